"""Checkpoints on disk: read from a job's shadow nodes, written as plain PyTorch reads them."""
