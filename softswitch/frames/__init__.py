"""Sources of frames: ports and network interfaces."""
