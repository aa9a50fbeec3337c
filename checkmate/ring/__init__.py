"""The tagging ring: AllReduce and AllGather over kernel TCP (design, section 3)."""

from checkmate.ring.collectives import AllGather, AllReduce
from checkmate.ring.connections import Ring, RingError, RingPlace, RingTimeout, connect_ring

__all__ = ["AllGather", "AllReduce", "Ring", "RingError", "RingPlace", "RingTimeout", "connect_ring"]
