"""Sends parameters and optimizer state to shadow nodes, in the background and a few MiB at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import torch
from torch import nn

from checkmate import state
from checkmate.nodes.stubs import reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.exclusion import StepExclusion
from checkmate.wire.layout import Layout

_log: Final = logging.getLogger("checkmate")

BATCH_BYTES: Final = 16 << 20
"""Approximate size of a stream of seeds. It is copied first, then sent while training continues."""
SEED_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.2


Values = tuple[torch.Tensor, Mapping[str, object]]
"""A parameter and its optimizer state."""


def values_of(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
) -> Callable[[int], Values]:
    """Return what returns a parameter, by number, with its optimizer state."""
    return lambda number: (parameters[number], optimizer.state.get(parameters[number], {}))


@dataclass(frozen=True)
class SeedSource:
    """The source of seeds. `values` returns what this rank has of a parameter of the layout, by number."""

    layout: Layout
    values: Callable[[int], Values]
    steps: StepExclusion

    def copy(
        self, numbers: Sequence[int], closing: threading.Event
    ) -> tuple[int, list[tuple[int, torch.Tensor, Mapping[str, object]]]] | None:
        """Copy parameters between two steps, all of one iteration and in memory order.

        Returns:
            The iteration, and copies of the first of these parameters: about `BATCH_BYTES`, or less if an
            optimizer step came between. `None` if `closing` is set.
        """
        copies: list[tuple[int, torch.Tensor, Mapping[str, object]]] = []
        at: int | None = None
        nbytes = 0
        for number in numbers:
            with self.steps.still(closing) as iteration:
                if iteration is None:
                    return None
                if at is not None and iteration != at:
                    break
                at = iteration
                tensor, values = copied(*self.values(number))
            copies.append((number, *state.to_held(self.layout.parameters[number], tensor, values)))
            nbytes += sum(
                value.nbytes for value in [tensor, *values.values()] if isinstance(value, torch.Tensor)
            )
            if nbytes >= BATCH_BYTES:
                break
        return None if at is None else (at, copies)


def copied(tensor: torch.Tensor, values: Mapping[str, object]) -> tuple[torch.Tensor, dict[str, object]]:
    """Return copies of what this rank has of a parameter and of its optimizer state, in host memory."""
    return _copy_tensor(tensor), {
        name: _copy_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return state.local_of(tensor).detach().to("cpu", copy=True)


class Seeder:
    """A thread that seeds one shadow node. `want` and `give` queue what the node lacks."""

    def __init__(
        self,
        node: int,
        stub: ShadowStub,
        source: SeedSource,
        header: Callable[[int, int], pb.SeedHeader],
    ) -> None:
        """Start the thread. `header` returns the header of a stream of seeds, by shard and iteration."""
        self._node = node
        self._stub = stub
        self._source = source
        self._header = header
        self._queued: dict[int, dict[int, None]] = {}  # by shard: parameters in order
        self._records: deque[tuple[int, pb.IterationRecord]] = deque()  # each with the shard of its header
        self.records_done = threading.Event()
        """Set, under the lock, while no record of `give` is left: all were sent, or given up."""
        self.records_done.set()
        self.given_up = ""
        """The reason why records of `give` were given up; empty if none were."""
        self._failure = ""  # of the last stream
        self._condition = threading.Condition()
        self._closing = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"seeds for {node}", daemon=True)
        self._thread.start()

    def want(self, shard: int, parameters: Iterable[int]) -> None:
        """Queue parameters of a shard, unless they are queued already."""
        with self._condition:
            self._queued.setdefault(shard, {}).update(dict.fromkeys(parameters))
            self._condition.notify_all()

    def give(self, shard: int, records: Sequence[pb.IterationRecord]) -> None:
        """Queue records to be sent once, each with a header of `shard`, after all queued parameters.

        Parameters come first because a node can't follow without them. If a record fails, it and all that
        follow are given up.
        """
        if not records:
            return
        with self._condition:
            self._records.extend((shard, record) for record in records)
            self.records_done.clear()
            self._condition.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        return self.records_done.is_set() and not any(self._queued.values())

    def close(self) -> None:
        """End the thread without sending the rest."""
        self._closing.set()
        with self._condition:
            self._condition.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._condition:
                self._condition.wait_for(lambda: self._closing.is_set() or not self.idle)
                todo = {shard: list(numbers) for shard, numbers in self._queued.items() if numbers}
            for shard, numbers in todo.items():
                self._send_some(shard, numbers)
            if not todo:
                self._give_one()

    def _give_one(self) -> None:
        """Send the next record of `give`, if there is one."""
        with self._condition:
            if not self._records:
                return
            shard, record = self._records.popleft()
        header = self._header(shard, record.iteration)
        header.record.CopyFrom(record)
        is_sent = self._send(header, ()) is not None
        with self._condition:
            if not is_sent:
                self.given_up = self._failure
                self._records.clear()
            if not self._records:
                self.records_done.set()

    def _send_some(self, shard: int, numbers: Sequence[int]) -> None:
        """Send one stream of seeds, with a batch of these parameters."""
        copied = self._source.copy(numbers, self._closing)
        if copied is None:
            return
        iteration, copies = copied
        batch = [number for number, _, _ in copies]
        header = self._header(shard, iteration)
        header.parameters.extend(batch)
        repeated = self._send(header, copies)
        if repeated is None:
            self._forget(shard, numbers)  # the node requests them again when it is back
        else:
            self._forget(shard, [number for number in batch if number not in repeated])
        if repeated is None or repeated:
            self._closing.wait(_PAUSE_SECONDS)

    def _send(
        self, header: pb.SeedHeader, copies: Iterable[tuple[int, torch.Tensor, Mapping[str, object]]]
    ) -> Collection[int] | None:
        """Send one stream of seeds. Return the parameters to send again, or `None` on failure."""
        try:
            self._call = self._stub.Seed.future(state.to_seeds(header, copies), timeout=SEED_SECONDS)
            if self._closing.is_set():
                self._call.cancel()
            return frozenset(self._call.result().again)  # asked for each parameter
        except grpc.FutureCancelledError:
            self._failure = "closed"
            return None
        except grpc.RpcError as error:
            self._failure = reason(error)
            _log.info("seeds for shadow node %d, shard %d: %s", self._node, header.shard.shard, self._failure)
            return None

    def _forget(self, shard: int, numbers: Iterable[int]) -> None:
        with self._condition:
            for number in numbers:
                self._queued[shard].pop(number, None)
