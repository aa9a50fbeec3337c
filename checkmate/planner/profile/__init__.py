"""Measurements of a machine as a shadow node, and the number of nodes that a model needs."""
