"""Builds the step record of each iteration."""
