"""Namespaces, links, shaping and cgroups."""
