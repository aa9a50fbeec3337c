"""A Tofino in a job: chips, ports, and what must hold of them."""
