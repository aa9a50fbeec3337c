"""PCcheck-like checkpoints: several are written at a time, in chunks, by several threads.

Source: F. Strati, M. Friedman, A. Klimovic, PCcheck, ASPLOS '25, section 3. A checkpoint goes to one of
N + 1 slots, a file each; N are in progress at most. The optimizer's step waits until its chunks are in
memory. The newest complete one counts, even if an older one is completed after it. Rank 0 saves.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.flat import FlatState, empty, flatten, restore_state
from benchmarks.comparators.system import CheckpointFolders, CheckpointSystem, broadcast_value

IN_PROGRESS: Final = 2
WRITERS: Final = 2
"""Checkpoints in progress, and threads for each: the paper's best for one disk."""
CHUNK: Final = 4 << 20
"""Bytes of a chunk."""
_NEWEST: Final = "newest.json"


@dataclass(frozen=True)
class _Slot:
    """A file for a checkpoint, and a buffer in memory."""

    number: int
    buffer: torch.Tensor


class ConcurrentCheckpoints(CheckpointSystem):
    """Writes up to `IN_PROGRESS` checkpoints at a time."""

    name = "PCcheck"

    def __init__(self, place: CheckpointFolders, in_progress: int = IN_PROGRESS) -> None:
        super().__init__(place)
        self._in_progress = in_progress

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job; on rank 0, start the threads that write."""
        super().attach(ddp, optimizer)
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._unused = [*range(self._in_progress + 1)]
        self._newest_slot: _Slot | None = None
        self._newest = -1
        self._lock = threading.Lock()
        self._copied: list[Future[None]] = []
        self._saving: list[Future[None]] = []
        self._permits = threading.Semaphore(self._in_progress)
        if self.rank == 0:
            self.place.disk.mkdir(parents=True, exist_ok=True)
            self._directors = ThreadPoolExecutor(self._in_progress)
            self._writers = ThreadPoolExecutor(self._in_progress * WRITERS)
            optimizer.register_step_pre_hook(lambda *_: self._await_copy())

    def after_step(self, iteration: int) -> None:
        """Begin a checkpoint on rank 0, once fewer than N are in progress."""
        if self.rank or not self.is_due(iteration):
            return
        self._permits.acquire()
        flat = flatten(self.steady_state())
        slot = self._slot(flat.nbytes)
        copied: Future[None] = Future()
        self._copied.append(copied)
        self._saving = [save for save in self._saving if not save.done() or save.result() is not None]
        self._saving.append(self._directors.submit(self._save, iteration, flat, slot, copied))

    def recover(self) -> int:
        """Read the newest complete slot."""
        index = self.place.disk / _NEWEST
        newest = broadcast_value(json.loads(index.read_text()) if index.exists() else None)
        if newest is None:
            return 0
        slot = self.place.disk / f"slot{newest['slot']}"
        described = torch.load(slot.with_suffix(".pt"), weights_only=True)
        flat = empty(described)
        if flat.nbytes:
            flat.write(0, torch.from_file(str(slot), size=flat.nbytes, dtype=torch.uint8))
        self.install(restore_state(flat))
        self._newest = int(newest["iteration"])
        self._unused.remove(newest["slot"])
        self._newest_slot = _Slot(newest["slot"], torch.empty(flat.nbytes, dtype=torch.uint8))
        return self._newest + 1

    def finish(self) -> None:
        """Wait until all that have begun are complete. Raise the first error."""
        for save in self._saving:
            save.result()
        self._saving.clear()

    def close(self) -> None:
        """Finish, and end the threads."""
        self.finish()
        if self.rank == 0:
            self._directors.shutdown()
            self._writers.shutdown()

    def _await_copy(self) -> None:
        """Wait until the state of every checkpoint in progress is in memory."""
        for copied in self._copied:
            copied.result()
        self._copied.clear()

    def _slot(self, nbytes: int) -> _Slot:
        """Return a free slot; there are N + 1, of which one has the newest complete checkpoint."""
        with self._lock:
            if self._unused:
                return _Slot(self._unused.pop(), torch.empty(nbytes, dtype=torch.uint8))
        return self._free.get()

    def _save(self, iteration: int, flat: FlatState, slot: _Slot, copied: Future[None]) -> None:
        """Copy chunks to memory, have each written as soon as it is there, and commit."""
        path = self.place.disk / f"slot{slot.number}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._write(file, flat, slot.buffer, copied)
                torch.save(flat.described, path.with_suffix(".pt"))
                _sync(path.with_suffix(".pt"))
                os.fsync(file)
            finally:
                os.close(file)
            self._commit(iteration, slot)
        except BaseException as error:
            if not copied.done():
                copied.set_exception(error)
            raise
        finally:
            self._permits.release()

    def _write(self, file: int, flat: FlatState, buffer: torch.Tensor, copied: Future[None]) -> None:
        os.posix_fallocate(file, 0, max(flat.nbytes, 1))
        chunks: list[Future[None]] = []
        for start in range(0, flat.nbytes, CHUNK):
            chunk = buffer[start : min(start + CHUNK, flat.nbytes)]
            flat.read(start, chunk)
            chunks.append(self._writers.submit(_write_all, file, start, chunk))
        copied.set_result(None)
        for write in chunks:
            write.result()

    def _commit(self, iteration: int, slot: _Slot) -> None:
        """Make this the newest checkpoint, unless a newer one was faster."""
        with self._lock:
            if iteration < self._newest:
                self._free.put(slot)
                return
            self._newest = iteration
            temporary = self.place.disk / f".{_NEWEST}"
            temporary.write_text(json.dumps({"iteration": iteration, "slot": slot.number}))
            _sync(temporary)
            temporary.replace(self.place.disk / _NEWEST)
            if self._newest_slot is not None:
                self._free.put(self._newest_slot)
            self._newest_slot = slot


def _write_all(file: int, start: int, chunk: torch.Tensor) -> None:
    """Write a chunk at its place in a file."""
    remainder = memoryview(chunk.numpy().data)
    while remainder:
        count = os.pwrite(file, remainder, start)
        remainder, start = remainder[count:], start + count


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
