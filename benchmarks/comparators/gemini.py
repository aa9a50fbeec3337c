"""Gemini: a checkpoint in the memory of two hosts, sent between the collectives of training.

Source: Z. Wang and others, GEMINI, SOSP '23, sections 4 and 5, and its artifact (zhuangwang93/Gemini_SOSP23).
The state is divided between ranks, because its ZeRO-3 does that. Each rank copies its part to its host's
memory after the step, and sends it to its peer's in chunks. It does not send while gradients are reduced.
Each host has room for two versions of a part: a complete one, and one in progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.flat import bounds, empty, flatten, restore_state
from benchmarks.comparators.reduction_gate import ReductionGate
from benchmarks.comparators.system import CheckpointFolders, PartedState

VERSIONS: Final = 2
"""One that is complete, and one in progress."""
CHUNK: Final = 4 << 20
"""Bytes that are sent at a time: about the 1 to 2 million numbers of the artifact for 100 Gbit/s."""


@dataclass(frozen=True)
class Copy:
    """A rank's complete part of a checkpoint, in this host's memory."""

    rank: int
    iteration: int
    version: int


class HostMemory:
    """The parts of checkpoints that a host keeps: of its own rank, and of its peer's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._open: dict[tuple[int, int], torch.Tensor] = {}

    def buffer(self, rank: int, version: int, nbytes: int) -> torch.Tensor:
        """Return the memory of a rank's part, whose content is not complete from now on."""
        self._mark(rank, version).unlink(missing_ok=True)
        return self._map(rank, version, nbytes)

    def mark_complete(self, rank: int, version: int, iteration: int, described: Any) -> None:
        """Note that a part is complete. `described` is that of `flat.FlatState`, of the whole state."""
        mark = self._mark(rank, version)
        temporary = mark.with_suffix(".unfinished")
        torch.save({"iteration": iteration, "described": described}, temporary)
        temporary.replace(mark)

    def copies(self) -> list[Copy]:
        """Return what is complete."""
        copies = []
        for mark in sorted(self._folder.glob("*.complete")):
            rank, version = mark.stem.split("-")
            copies.append(Copy(int(rank), int(self._read(mark)["iteration"]), int(version)))
        return copies

    def description(self, copy: Copy) -> Any:
        """Return the description of the state of which a part is complete."""
        return self._read(self._mark(copy.rank, copy.version))["described"]

    def part(self, copy: Copy, nbytes: int) -> torch.Tensor:
        """Return the content of a complete part."""
        return self._map(copy.rank, copy.version, nbytes)

    def _map(self, rank: int, version: int, nbytes: int) -> torch.Tensor:
        key = rank, version
        if key not in self._open or self._open[key].numel() != nbytes:
            path = str(self._folder / f"{rank}-{version}")
            self._open[key] = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return self._open[key]

    def _mark(self, rank: int, version: int) -> Path:
        return self._folder / f"{rank}-{version}.complete"

    @staticmethod
    def _read(mark: Path) -> Mapping[str, Any]:
        header: dict[str, Any] = torch.load(mark, weights_only=True)
        return header


class Gemini(PartedState):
    """Checkpoints in memory, one in progress at a time. Sends between reductions, if `interleaved`."""

    name = "Gemini"
    interleaved: ClassVar[bool] = True
    switchable = False  # its hook stays

    def __init__(self, place: CheckpointFolders) -> None:
        super().__init__(place)
        self._memory = HostMemory(place.memory)

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job, with process groups of its own and a hook on the reductions."""
        super().attach(ddp, optimizer)
        self._group = dist.new_group(backend="gloo")
        self._reductions = ReductionGate(ddp.process_group)
        self._to, self._from = peers(self.ranks, self.rank)
        self._sender = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._version = 0
        if self.interleaved:
            ddp.register_comm_hook(self._reductions, ReductionGate.averaging)

    def after_step(self, iteration: int) -> None:
        """Copy this rank's part to its host's memory, and begin to send it to the peer's."""
        if not self.is_due(iteration):
            return
        self.finish()
        flat = flatten(self.state())
        start, stop = self._bounds(flat.nbytes, self.rank)
        part = self._memory.buffer(self.rank, self._version, stop - start)
        flat.read(start, part)
        work = (iteration, self._version, part, flat.nbytes, flat.described)
        self._pending = self._sender.submit(self._exchange, *work)
        self._version = (self._version + 1) % VERSIONS
        if not self.interleaved:
            self.finish()

    def recover(self) -> int:
        """Install the newest checkpoint of which some host has each part; hosts send parts to all ranks."""
        copies: list[list[Copy]] = [[] for _ in range(self.ranks)]
        dist.all_gather_object(copies, self._memory.copies())
        newest = newest_of(copies)
        if newest is None:
            return 0
        holders = [holder_of(copies, rank, newest) for rank in range(self.ranks)]
        described = self._share_description(copies, holders[0], newest)
        flat = empty(described)
        for rank, holder in enumerate(holders):
            start, stop = self._bounds(flat.nbytes, rank)
            part = torch.empty(stop - start, dtype=torch.uint8)
            if holder == self.rank:
                copy = next(
                    held_copy
                    for held_copy in copies[holder]
                    if (held_copy.rank, held_copy.iteration) == (rank, newest)
                )
                part.copy_(self._memory.part(copy, stop - start))
            dist.broadcast(part, holder)
            flat.write(start, part)
        self.install(restore_state(flat))
        newest_copy = next(
            (held_copy for held_copy in copies[self.rank] if held_copy.iteration == newest), None
        )
        self._version = 0 if newest_copy is None else (newest_copy.version + 1) % VERSIONS
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
        buffers = sum(buffer.nbytes for buffer in self.buffers())
        return bounds(nbytes, self.ranks, rank, buffers)

    def _share_description(self, copies: Sequence[Sequence[Copy]], holder: int, newest: int) -> Any:
        boxed = [None]
        if holder == self.rank:
            boxed = [
                self._memory.description(next(copy for copy in copies[holder] if copy.iteration == newest))
            ]
        dist.broadcast_object_list(boxed, holder)
        return boxed[0]

    def _exchange(
        self, iteration: int, version: int, part: torch.Tensor, nbytes: int, described: Any
    ) -> None:
        """Send this rank's part and receive its peer's; return once all hosts have theirs."""
        start, stop = self._bounds(nbytes, self._from)
        peer_part = self._memory.buffer(self._from, version, stop - start)
        receives = [dist.irecv(chunk, self._from, self._group) for chunk in _chunks(peer_part)]
        for chunk in _chunks(part):
            self._reductions.wait()
            send = dist.isend(chunk, self._to, self._group)
            assert send is not None
            send.wait()
        for receive in receives:
            assert receive is not None
            receive.wait()
        self._memory.mark_complete(self._from, version, iteration, described)
        self._memory.mark_complete(self.rank, version, iteration, described)
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


def newest_of(copies_by_host: Sequence[Sequence[Copy]]) -> int | None:
    """Return the newest iteration of which some host has each rank's part."""
    ranks = range(len(copies_by_host))
    iterations = {copy.iteration for copies in copies_by_host for copy in copies}
    whole = [
        iteration
        for iteration in iterations
        if all(holder_of(copies_by_host, rank, iteration) >= 0 for rank in ranks)
    ]
    return max(whole, default=None)


def holder_of(copies_by_host: Sequence[Sequence[Copy]], rank: int, iteration: int) -> int:
    """Return the rank whose host has a rank's part of an iteration; its own if possible, -1 if none has."""
    order = sorted(range(len(copies_by_host)), key=lambda host: host != rank)
    return next((host for host in order if _has(copies_by_host[host], rank, iteration)), -1)


def _has(copies: Sequence[Copy], rank: int, iteration: int) -> bool:
    return any((copy.rank, copy.iteration) == (rank, iteration) for copy in copies)


def _chunks(data: torch.Tensor) -> list[torch.Tensor]:
    return [data[start : start + CHUNK] for start in range(0, data.numel(), CHUNK)]
