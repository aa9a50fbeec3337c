"""Tofinos in a job: chips, ports, and rules for them."""
