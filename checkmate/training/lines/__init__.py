"""A rank's connections to shadow nodes."""
