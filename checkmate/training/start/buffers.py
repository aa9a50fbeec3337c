"""The buffers that a rank records, by its place in its group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from checkmate.training.record.buffers import Buffers, frozen_state
from checkmate.training.record.capture import Watched
from checkmate.training.start.install import own_buffers
from checkmate.training.start.membership import Membership, Start


def recorded_buffers(
    place: Membership, watched: Watched, parameters: Sequence[nn.Parameter], start: Start
) -> Buffers:
    """Return the buffers that this rank records; only the first rank records those that all ranks share."""
    model, optimizer = watched.model, watched.optimizer
    if place.first:
        trained = set(parameters)
        return Buffers(
            lambda: model.kept_beside() | frozen_state(optimizer, trained, model.parameters), everything=True
        )
    if model.broadcasts_buffers:
        return Buffers(model.extra_states, everything=False)  # which DDP does not broadcast
    changed = own_buffers(start.record, place.position)
    return Buffers(model.kept_beside, everything=False, changed=changed)
