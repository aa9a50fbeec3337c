"""Gemini: a checkpoint in the memory of two hosts, sent between the collectives of training.

Source: Z. Wang and others, GEMINI, SOSP '23, sections 4 and 5, and its artifact (zhuangwang93/Gemini_SOSP23).
The state is divided between ranks, because its ZeRO-3 does that. Each rank copies its part to its host's
memory after the step, and sends it to its peer's in chunks. It does not send while gradients are reduced.
Each host has room for two versions of a part: a complete one, and one in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.flat import bounds, empty, flatten, restored
from benchmarks.comparators.host_memory import VERSIONS, Copy, HostMemory
from benchmarks.comparators.parted import PartedState
from benchmarks.comparators.quiet import Quiet
from benchmarks.comparators.system import Place

CHUNK: Final = 4 << 20
"""Bytes that are sent at a time: about the 1 to 2 million numbers of the artifact for 100 Gbit/s."""


class Gemini(PartedState):
    """Checkpoints in memory, one in progress at a time. Sends between reductions, if `interleaved`."""

    name = "Gemini"
    interleaved: ClassVar[bool] = True
    switchable = False  # its hook stays

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._memory = HostMemory(place.memory)

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job, with process groups of its own and a hook on the reductions."""
        super().attach(ddp, optimizer)
        self._group = dist.new_group(backend="gloo")
        self._quiet = Quiet(ddp.process_group)
        self._to, self._from = peers(self.ranks, self.rank)
        self._sender = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._version = 0
        if self.interleaved:
            ddp.register_comm_hook(self._quiet, Quiet.averaging)

    def after_step(self, iteration: int) -> None:
        """Copy this rank's part to its host's memory, and begin to send it to the peer's."""
        if not self.due(iteration):
            return
        self.finish()
        flat = flatten(self.state())
        start, stop = self._bounds(flat.nbytes, self.rank)
        own = self._memory.buffer(self.rank, self._version, stop - start)
        flat.read(start, own)
        work = (iteration, self._version, own, flat.nbytes, flat.described)
        self._pending = self._sender.submit(self._exchange, *work)
        self._version = (self._version + 1) % VERSIONS
        if not self.interleaved:
            self.finish()

    def recover(self) -> int:
        """Install the newest checkpoint of which some host has each part; hosts send parts to all ranks."""
        told: list[list[Copy]] = [[] for _ in range(self.ranks)]
        dist.all_gather_object(told, self._memory.copies())
        newest = newest_of(told)
        if newest is None:
            return 0
        holders = [holder_of(told, rank, newest) for rank in range(self.ranks)]
        described = self._described(told, holders[0], newest)
        flat = empty(described)
        for rank, holder in enumerate(holders):
            start, stop = self._bounds(flat.nbytes, rank)
            part = torch.empty(stop - start, dtype=torch.uint8)
            if holder == self.rank:
                copy = next(one for one in told[holder] if (one.rank, one.iteration) == (rank, newest))
                part.copy_(self._memory.part(copy, stop - start))
            dist.broadcast(part, holder)
            flat.write(start, part)
        self.install(restored(flat))
        kept = next((one for one in told[self.rank] if one.iteration == newest), None)
        self._version = 0 if kept is None else (kept.version + 1) % VERSIONS
        return newest + 1

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete on all hosts."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Finish, and end the thread."""
        self.finish()
        self._sender.shutdown()

    def _bounds(self, nbytes: int, rank: int) -> tuple[int, int]:
        """Return a rank's part."""
        buffers = sum(one.nbytes for one in self.buffers())
        return bounds(nbytes, self.ranks, rank, buffers)

    def _described(self, told: Sequence[Sequence[Copy]], holder: int, newest: int) -> Any:
        found = [None]
        if holder == self.rank:
            found = [self._memory.described(next(one for one in told[holder] if one.iteration == newest))]
        dist.broadcast_object_list(found, holder)
        return found[0]

    def _exchange(self, iteration: int, version: int, own: torch.Tensor, nbytes: int, described: Any) -> None:
        """Send this rank's part and receive its peer's; return once all hosts have theirs."""
        start, stop = self._bounds(nbytes, self._from)
        other = self._memory.buffer(self._from, version, stop - start)
        coming = [dist.irecv(chunk, self._from, self._group) for chunk in _chunks(other)]
        for chunk in _chunks(own):
            self._quiet.wait()
            sent = dist.isend(chunk, self._to, self._group)
            assert sent is not None
            sent.wait()
        for one in coming:
            assert one is not None
            one.wait()
        self._memory.completed(self._from, version, iteration, described)
        self._memory.completed(self.rank, version, iteration, described)
        # No host may overwrite the version before as long as another lacks this one.
        dist.barrier(self._group)


class GeminiBlocking(Gemini):
    """Gemini without interleaving: training waits until the checkpoint is complete on both hosts."""

    name = "Gemini, blocking"
    interleaved = False
    switchable = True


def peers(ranks: int, rank: int) -> tuple[int, int]:
    """Return the rank to which a rank sends its part, and the one from which it receives: pairs of hosts.

    If their number is odd, the last three are a ring (the paper's mixed placement).
    """
    if ranks % 2 and rank >= ranks - 3:
        ring = [*range(max(ranks - 3, 0), ranks)]
        at = ring.index(rank)
        return ring[(at + 1) % len(ring)], ring[at - 1]
    return rank ^ 1, rank ^ 1


def newest_of(told: Sequence[Sequence[Copy]]) -> int | None:
    """Return the newest iteration of which some host has each rank's part."""
    every = range(len(told))
    iterations = {copy.iteration for copies in told for copy in copies}
    whole = [one for one in iterations if all(holder_of(told, rank, one) >= 0 for rank in every)]
    return max(whole, default=None)


def holder_of(told: Sequence[Sequence[Copy]], rank: int, iteration: int) -> int:
    """Return the rank whose host has a rank's part of an iteration; its own if possible, -1 if none has."""
    order = sorted(range(len(told)), key=lambda host: host != rank)
    return next((host for host in order if _has(told[host], rank, iteration)), -1)


def _has(copies: Sequence[Copy], rank: int, iteration: int) -> bool:
    return any((copy.rank, copy.iteration) == (rank, iteration) for copy in copies)


def _chunks(data: torch.Tensor) -> list[torch.Tensor]:
    return [data[start : start + CHUNK] for start in range(0, data.numel(), CHUNK)]
