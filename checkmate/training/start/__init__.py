"""The start of training: restore, and what `protect` does before the first iteration."""
