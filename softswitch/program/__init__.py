"""A compiled program: loaded, and what it holds as it runs."""
