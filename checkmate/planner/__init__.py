"""What checkpointing costs, and what shadow nodes it takes: planned before anything is bought."""
