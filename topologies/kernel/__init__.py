"""Kernel objects of a lab: namespaces, links, shaping and cgroups."""
