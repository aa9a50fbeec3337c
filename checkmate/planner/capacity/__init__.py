"""Comparison of a job's demand with the available resources."""
