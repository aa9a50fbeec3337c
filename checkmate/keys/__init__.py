"""A job's keys: its certificate authority, and a folder of keys for each role."""
