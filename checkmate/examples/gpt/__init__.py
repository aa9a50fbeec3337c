"""A small GPT trained on Python's own documentation with DDP, protected by Checkmate."""
