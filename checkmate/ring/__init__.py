"""The tagging ring: AllReduce and AllGather over kernel TCP (design, section 3)."""

from checkmate.ring.allgather import AllGather
from checkmate.ring.allreduce import AllReduce
from checkmate.ring.connections import Place, Ring, RingError, connect_ring

__all__ = ["AllGather", "AllReduce", "Place", "Ring", "RingError", "connect_ring"]
