"""Formats on the wire: tag and hello, schedule and layout of gradients, TCP options."""
