"""The tagging ring: AllReduce and AllGather over kernel TCP (design, section 3)."""

from checkmate.ring.collectives import AllGather, AllReduce
from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace, RingTimeout

__all__ = ["AllGather", "AllReduce", "Ring", "RingError", "RingPlace", "RingTimeout", "connect_ring"]
