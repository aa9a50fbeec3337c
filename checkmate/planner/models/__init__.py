"""Models and optimizers by name, without their data."""
