"""Backward: gradients over the ring, tagged."""
