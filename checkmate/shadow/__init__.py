"""The shadow node (design, sections 4 and 7)."""

from checkmate.shadow.receive.connect import StreamError, connect_stream, tcp_memory_shortfall

__all__ = ["StreamError", "connect_stream", "tcp_memory_shortfall"]
