"""The switch under test: one in a namespace, or one that is already running."""
