"""Labs: hosts, links, switches and a job, in network namespaces."""
