"""A job on loopback without a switch: plays the copies and the trainers, to drive real shadow nodes."""
