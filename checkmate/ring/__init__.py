"""The tagging ring: AllReduce and AllGather over kernel TCP (design, section 3)."""

from checkmate.ring.allgather import AllGather
from checkmate.ring.allreduce import AllReduce
from checkmate.ring.connections import Ring, RingError, RingPlace, connect_ring

__all__ = ["AllGather", "AllReduce", "Ring", "RingError", "RingPlace", "connect_ring"]
