"""The optimizers that Checkmate supports, and their options exact to the last bit."""
