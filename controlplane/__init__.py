"""Control plane: from job YAMLs to what the switches hold, and the stub TCP endpoint."""
