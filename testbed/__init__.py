"""A job on loopback: emulated trainers and switch copies that drive real shadow nodes."""
