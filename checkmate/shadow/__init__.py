"""The shadow node (design, sections 4 and 7)."""
