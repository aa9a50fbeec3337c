"""What any process of the project may use, the embedded target included. It knows no job."""
