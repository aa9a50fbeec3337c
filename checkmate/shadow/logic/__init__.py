"""State and decisions of a shadow node. Pure."""
