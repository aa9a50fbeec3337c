"""Compares what NCCL sends with what the layout foresees, before gradients are tagged."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import torch

from checkmate.nccl.library import NcclLibrary
from checkmate.training.gradients.nccl_reducer import NcclReducer
from checkmate.training.start.membership import Membership
from checkmate.wire.layout import Layout
from checkmate.wire.nccl_slicing import NcclSlicing

_PIECE: Final = 1 << 20
"""Elements that are predicted at once."""
_SECONDS: Final = 10.0
"""How long the last sends may take after the device is done."""
_POLL_SECONDS: Final = 0.001

Compared = dict[tuple[int, int], int]
"""Bytes of fully reduced sends, by channel and shadow id."""


def calibrate(place: Membership, layout: Layout, library: NcclLibrary, reducer: NcclReducer) -> str:
    """Reduce each bucket once with known values. Return why tags would be wrong, or "". All ranks call it.

    The group's first rank has values that follow from bucket and element, the others have zeros, and their
    sum is compared by the plugin in every send that is fully reduced. Buckets are zero afterwards.
    """
    library.calibrate(on=True)
    try:
        for index, tensor in enumerate(reducer.tensors):
            if place.first:
                _fill(tensor, library, index)
            reducer.communicator.all_reduce(tensor, average=False)
        reducer.communicator.synchronize()
        trouble = _await_sends(library, foreseen(place, layout))
    except RuntimeError as error:
        trouble = f"NCCL: {error}"
    finally:
        library.calibrate(on=False)
    for tensor in reducer.tensors:
        tensor.zero_()
    return trouble


def foreseen(place: Membership, layout: Layout) -> Compared:
    """Return what this rank sends fully reduced, as the layout's slicing has it."""
    slicing = layout.slicing
    assert isinstance(slicing, NcclSlicing)
    found: Compared = Counter()
    for bucket in layout.schedule:
        for channel in range(place.job.channels):
            part = slicing.part(bucket.elements, bucket.itemsize, place.job.channels, channel)
            for send in slicing.sends(part, bucket.itemsize, place.ranks, place.position):
                if send.round >= 0:
                    found[channel, place.first_id + bucket.shadow_id] += len(send.where) * bucket.itemsize
    return found


def compared(library: NcclLibrary, streams: Compared) -> Compared:
    """Return what the plugin has compared so far."""
    return {stream: library.calibrated(*stream).nbytes for stream in streams}


def _fill(tensor: torch.Tensor, library: NcclLibrary, index: int) -> None:
    for start in range(0, len(tensor), _PIECE):
        piece = tensor[start : start + _PIECE]
        predicted = library.prediction(index, range(start, start + len(piece)))
        piece.copy_(torch.frombuffer(predicted, dtype=tensor.dtype))


def _await_sends(library: NcclLibrary, expected: Compared) -> str:
    """Wait until all expected bytes are compared. A device is done before its last send has left."""
    deadline = time.monotonic() + _SECONDS
    while not library.trouble and compared(library, expected) != expected:
        if not library.used(0):
            return (
                "NCCL has not loaded the plugin, because it made its first communicator without it: run "
                'eval "$(checkmate nccl build)" before torchrun'
            )
        if time.monotonic() > deadline:
            seen, total = sum(compared(library, expected).values()), sum(expected.values())
            return f"NCCL has sent {seen} bytes of fully reduced data through the plugin, and not {total}"
        time.sleep(_POLL_SECONDS)
    return library.trouble
