"""Replicas of parameters and optimizer state, stepped like those of training."""
