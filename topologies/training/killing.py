"""A rank that kills itself at a given point of an iteration."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from checkmate.ring.connections import PlainSocket
from checkmate.tagger import TaggedSocket
from checkmate.training.model.trained import TrainedModel
from topologies.training.orders import Kill


def arm(
    kill: Kill,
    model: TrainedModel,
    ranks: int,
    optimizer: Optimizer,
    iteration: Callable[[], int],
    last_words: Callable[[], None],
) -> None:
    """Have this process kill itself at the point in `kill`.

    Args:
        kill: The point.
        model: The model.
        ranks: The number of ranks in this rank's DP group.
        optimizer: Its optimizer.
        iteration: Returns the current iteration.
        last_words: Called just before.
    """

    def die_if_due(*_: Any) -> None:
        if iteration() == kill.iteration:
            die(last_words)

    if kill.phase == "forward":
        modules = list(model.inner.modules())
        modules[len(modules) // 2].register_forward_hook(die_if_due)
    elif kill.phase == "before the step":
        optimizer.register_step_pre_hook(die_if_due)
    elif kill.phase == "after the step":
        optimizer.register_step_post_hook(die_if_due)
    else:
        rounds = ranks - 1
        first = 2 * rounds * kill.bucket + (rounds if kill.phase == "all-gather" else 0)
        _watch_ring(range(first, first + rounds), iteration, kill.iteration, last_words)


def _watch_ring(
    chunks: range, iteration: Callable[[], int], when: int, last_words: Callable[[], None]
) -> None:
    """Kill this process in the middle of a write of these chunks, as counted on one ring connection."""
    watched: list[object] = []
    chunk = -1

    def begin(sock: Any, length: int, shadow_id: int | None, original: Callable[..., None]) -> None:
        nonlocal chunk
        if iteration() == when and watched[:1] in ([], [sock]):
            watched[:] = [sock]
            chunk += 1
        original(sock, length, shadow_id)

    def write(sock: Any, piece: memoryview | bytes, original: Callable[..., None]) -> None:
        if watched[:1] == [sock] and chunk in chunks[1:]:
            original(sock, piece[: len(piece) // 2])
            die(last_words)
        original(sock, piece)

    for kind in (PlainSocket, TaggedSocket):
        _wrap(kind, begin, write)


def _wrap(kind: Any, begin: Callable[..., None], write: Callable[..., None]) -> None:
    begin_before, write_before = kind.begin_chunk, kind.write
    kind.begin_chunk = lambda self, length, shadow_id=None: begin(self, length, shadow_id, begin_before)
    kind.write = lambda self, piece: write(self, piece, write_before)


def die(last_words: Callable[[], None]) -> None:
    """Call `last_words`, and kill this process with SIGKILL."""
    last_words()
    os.kill(os.getpid(), signal.SIGKILL)
