"""A compiled program as data, and its state at run time."""
