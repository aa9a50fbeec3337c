"""Checkpoints on disk: read from a job's shadow nodes, written in plain PyTorch's formats."""
