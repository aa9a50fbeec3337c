"""The description of a lab: hosts, links, addresses and job, from a small YAML file."""
