"""Shadow nodes: receiving, stepping, memory."""
