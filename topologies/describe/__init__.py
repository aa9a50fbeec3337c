"""From a small YAML to hosts, links, addresses and the job. Pure but for reading it."""
