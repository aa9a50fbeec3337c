"""The NCCL plugin: its C library, and what Python tells it."""
