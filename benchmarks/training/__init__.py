"""Training: AllReduce, the cost of an iteration, recovery."""
