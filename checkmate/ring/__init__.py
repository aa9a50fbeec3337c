"""The tagging ring: AllGather over kernel TCP, with the heartbeat schedule (design, section 3)."""

from checkmate.ring.allgather import AllGather
from checkmate.ring.connections import Place, Ring, RingError, connect_ring

__all__ = ["AllGather", "Place", "Ring", "RingError", "connect_ring"]
