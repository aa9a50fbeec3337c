"""What checkpointing costs: closed form and simulation."""
