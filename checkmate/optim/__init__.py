"""Which optimizers Checkmate follows, and their options to the last bit."""
