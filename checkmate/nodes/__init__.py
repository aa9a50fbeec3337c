"""The client side of a job's shadow nodes: which nodes have which state, and how to read it."""
