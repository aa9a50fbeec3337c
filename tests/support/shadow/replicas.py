"""Measures of replicas that only tests need."""

from __future__ import annotations

import torch

from checkmate.shadow.replica.replica import Replica
from checkmate.shadow.resources import HoldResources


def iteration_of(replica: Replica) -> int | None:
    """Return the iteration of all parameters, or `None` if they differ or some are not seeded."""
    iterations = {replica.at.get(number) for number in replica.numbers}
    return iterations.pop() if len(iterations) == 1 else None


def bytes_of_replica(replica: Replica) -> int:
    """Return the bytes of parameters and optimizer state, without scalars, copies for readers included."""
    tensors = [tensor for p in replica._parameters.values() for tensor in (p.tensor, *p.whole.values())]
    copies = [copy for reservation in replica._reservations.values() for copy in reservation.copies.values()]
    values = [value for tensor, state in copies for value in (tensor, *state.values())]
    return sum(tensor.nbytes for tensor in (*tensors, *values) if isinstance(tensor, torch.Tensor))


def bytes_of_hold(resources: HoldResources) -> int:
    """Return the bytes of a hold's replica and buckets."""
    buckets = [bucket for buckets in resources.sets.tensors for bucket in buckets.values()]
    return bytes_of_replica(resources.replica) + sum(bucket.nbytes for bucket in buckets)
