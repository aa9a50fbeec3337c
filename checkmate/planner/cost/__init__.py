"""The cost of checkpointing: closed form and simulation."""
