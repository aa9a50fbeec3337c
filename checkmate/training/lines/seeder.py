"""Gives shadow nodes parameters and optimizer state, in the background and a few MiB at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""A stream of seeds has about so much: it is copied first, and then sent while training goes on."""
SEED_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True)
class SeedSource:
    """Where seeds come from: this rank's parameters by number, and its optimizer's state of them."""

    layout: Layout
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    steps: StepExclusion

    def copy(
        self, wanted: Sequence[int], ended: threading.Event
    ) -> tuple[int, list[tuple[int, torch.Tensor, Mapping[str, object]]]] | None:
        """The iteration, and copies of the first of `wanted` as after it; `None` once `ended` is set.

        Each is copied between two steps; where a step comes between two of them, only those before it count.
        They stand in memory order.
        """
        copies: list[tuple[int, torch.Tensor, Mapping[str, object]]] = []
        at: int | None = None
        nbytes = 0
        for number in wanted:
            with self.steps.still(ended) as iteration:
                if iteration is None:
                    return None
                if at is not None and iteration != at:
                    break
                at = iteration
                parameter = self.parameters[number]
                values = {
                    name: _copy(value) for name, value in self.optimizer.state.get(parameter, {}).items()
                }
                tensor = parameter.detach().to("cpu", copy=True)
            copies.append((number, *state.to_held(self.layout.parameters[number], tensor, values)))
            nbytes += sum(
                value.nbytes for value in [tensor, *values.values()] if isinstance(value, torch.Tensor)
            )
            if nbytes >= BATCH_BYTES:
                break
        return None if at is None else (at, copies)


def _copy(value: object) -> object:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class Seeder:
    """A thread that seeds one shadow node. What it lacks is asked for by `want`, as often as it says so."""

    def __init__(
        self,
        node: int,
        stub: ShadowStub,
        source: SeedSource,
        header: Callable[[int, int], pb.SeedHeader],
    ) -> None:
        """`header`: what a stream of seeds of (shard, iteration) begins with, but for its parameters."""
        self._node = node
        self._stub = stub
        self._source = source
        self._header = header
        self._wanted: dict[int, dict[int, None]] = {}  # by shard: parameters in order
        self._records: deque[tuple[int, pb.IterationRecord]] = deque()  # each with the shard of its header
        self.given = threading.Event()
        """Set, under the lock, while no record of `give` is left: all are sent, or given up."""
        self.given.set()
        self.given_up = ""
        """Why records of `give` were given up; empty where none was."""
        self._failure = ""  # the last stream's
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"seeds for {node}", daemon=True)
        self._thread.start()

    def want(self, shard: int, parameters: Iterable[int]) -> None:
        """Send these, unless they are about to be sent."""
        with self._changed:
            self._wanted.setdefault(shard, {}).update(dict.fromkeys(parameters))
            self._changed.notify_all()

    def give(self, shard: int, records: Sequence[pb.IterationRecord]) -> None:
        """Send these once, each with a header of `shard`, while no parameters are left to be sent.

        Parameters go first: without them a node follows nothing. From the first that fails on, records are
        given up.
        """
        if not records:
            return
        with self._changed:
            self._records.extend((shard, record) for record in records)
            self.given.clear()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be sent."""
        return self.given.is_set() and not any(self._wanted.values())

    def close(self) -> None:
        """End the thread, whatever is left."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._ended.is_set() or not self.idle)
                todo = {shard: list(numbers) for shard, numbers in self._wanted.items() if numbers}
            for shard, numbers in todo.items():
                self._send_some(shard, numbers)
            if not todo:
                self._give_one()

    def _give_one(self) -> None:
        """The next record of `give`, if there is one."""
        with self._changed:
            if not self._records:
                return
            shard, record = self._records.popleft()
        header = self._header(shard, record.iteration)
        header.record.CopyFrom(record)
        sent = self._send(header, ()) is not None
        with self._changed:
            if not sent:
                self.given_up = self._failure
                self._records.clear()
            if not self._records:
                self.given.set()

    def _send_some(self, shard: int, numbers: Sequence[int]) -> None:
        """One stream of seeds: as many parameters as a batch has."""
        copied = self._source.copy(numbers, self._ended)
        if copied is None:
            return
        iteration, copies = copied
        sent = [number for number, _, _ in copies]
        header = self._header(shard, iteration)
        header.parameters.extend(sent)
        again = self._send(header, copies)
        if again is None:
            self._forget(shard, numbers)  # it asks again when it is back
        else:
            self._forget(shard, [number for number in sent if number not in again])
        if again is None or again:
            self._ended.wait(_PAUSE_SECONDS)

    def _send(
        self, header: pb.SeedHeader, copies: Iterable[tuple[int, torch.Tensor, Mapping[str, object]]]
    ) -> Sequence[int] | None:
        """One stream of seeds: what is to come again, or `None` where it failed or the thread is to end."""
        try:
            self._call = self._stub.Seed.future(state.to_seeds(header, copies), timeout=SEED_SECONDS)
            if self._ended.is_set():
                self._call.cancel()
            return list(self._call.result().again)
        except grpc.FutureCancelledError:
            self._failure = "closed"
            return None
        except grpc.RpcError as error:
            self._failure = reason(error)
            _log.info("seeds for shadow node %d, shard %d: %s", self._node, header.shard.shard, self._failure)
            return None

    def _forget(self, shard: int, numbers: Iterable[int]) -> None:
        with self._changed:
            for number in numbers:
                self._wanted[shard].pop(number, None)
