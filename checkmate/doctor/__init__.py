"""Checks of a host for its role in a job, each with a remedy."""
