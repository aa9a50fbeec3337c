"""A small GPT that learns Python's own documentation, trained with DDP and protected by Checkmate."""
