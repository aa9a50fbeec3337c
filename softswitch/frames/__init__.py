"""Frames and where they come from: ports and network interfaces."""
