"""The job file: its schema, its faults, and what follows from it."""
