"""Labs: hosts, links, switches and job of each, in network namespaces."""
