"""The cost of checkpointing, and the shadow nodes that it takes: planned before anything is bought."""
