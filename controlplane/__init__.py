"""Control plane: from job files to switch entries, and the stub TCP endpoint."""
