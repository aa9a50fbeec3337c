"""Checkmate: checkpoints of data-parallel training, never older than one iteration."""
