"""The shadow node: its streams, and the sink that reads and digests them (design, section 4)."""

from checkmate.shadow.receive.connect import StreamError, connect_stream, tcp_memory_shortfall

__all__ = ["StreamError", "connect_stream", "tcp_memory_shortfall"]
