"""A machine as a shadow node: measured, and how many a model needs."""
