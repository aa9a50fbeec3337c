"""Reads a job's state from its shadow nodes at one iteration: all shards at once, verified; never fences.

The iteration is reserved on every node before anything is read, so all of them serve the same one however
training goes on meanwhile (design, section 7, *Commit*).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import torch

from checkmate import state
from checkmate.consolidate.choose import LAB_HINT, Lacking, NoAnswer, Shard, Source, choose, lacking, name
from checkmate.consolidate.headers import Asked, check_header, most_parts, record_of
from checkmate.layout import Layout, from_json
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.schema import Job

T = TypeVar("T")
States = dict[int, tuple[torch.Tensor, dict[str, object]]]

ANSWER_SECONDS: Final = 5.0
"""A node that takes longer for a short answer is taken to be away."""
STEP_SECONDS: Final = 10.0
"""An iteration that isn't stepped so soon may never be: another one is named."""
AGAIN_SECONDS: Final = 0.2
_ROOT: Final = re.compile(
    r"(?:ipv[46]|unix):\S+: (?:Failed to connect to remote host: )?(?:[a-z_]+: )?(?P<why>.+?)(?: \(\d+\))?$"
)
"""In gRPC's `... UNKNOWN: ipv4:10.0.0.1:7000: Failed to connect to remote host: connect: why (111)`."""
_MARGINS: Final = (0, 1, 2, 4, 8)
"""How far ahead of the newest iteration to name one, where training was faster."""


class Missing(RuntimeError):
    """No iteration could be had whole within the timeout; the message names shards and nodes."""

    exit_code = 8


class Unreachable(Missing):
    """No shadow node answered within the timeout."""

    exit_code = 3


@dataclass(frozen=True)
class GroupState:
    """One DP group's state after an iteration, from all of its shards."""

    layout: Layout
    optimizer: pb.OptimizerSpec
    record: pb.IterationRecord
    names: Mapping[str, str]
    states: States


@dataclass(frozen=True)
class Snapshot:
    """A job's state after one iteration, all DP groups."""

    job: Job
    run: str
    iteration: int
    groups: tuple[GroupState, ...]


class Nodes:
    """A job's shadow nodes, asked over gRPC. Context manager; `TlsError` for the job's files."""

    def __init__(
        self,
        job: Job,
        progress: Callable[[int], None] = lambda nbytes: None,
        stopped: threading.Event | None = None,
    ) -> None:
        """`progress` is told of bytes as they come, from several threads; `stopped` ends attempts early."""
        self.job = job
        self._stopped = stopped or threading.Event()
        self._progress = progress
        self._channels = {node.id: open_channel(job, node.id) for node in job.shadow_nodes}
        self._stubs = {node: ShadowStub(channel) for node, channel in self._channels.items()}

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def read(self, timeout: float, at_least: int = 0) -> Snapshot:
        """The newest iteration that all can give, not below `at_least` unless training ends before that.

        `Missing` after `timeout` seconds, `Unreachable` where no node answers.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._attempt(deadline, at_least)
            except Lacking as error:
                left = deadline - time.monotonic() > AGAIN_SECONDS
                if not left or self._stopped.wait(AGAIN_SECONDS):
                    if isinstance(error, NoAnswer):
                        raise Unreachable(
                            f"no shadow node of job {self.job.job} can be reached within {timeout:g} s "
                            f"({error}); {LAB_HINT}"
                        ) from error
                    raise Missing(f"no iteration is whole within {timeout:g} s: {error}") from error

    def source(self) -> Source:
        """Where the nodes stand now; `Lacking` where some shard has no node."""
        return self._source(time.monotonic() + ANSWER_SECONDS)

    def _attempt(self, deadline: float, at_least: int) -> Snapshot:
        source = self._source(deadline)
        with self._reserved(source, deadline, 0 if source.ended else at_least) as (iteration, granted):
            return self._fetch_all(source, iteration, granted, deadline)

    def _source(self, deadline: float) -> Source:
        request = pb.StatusRequest(job=self.job.job)
        return choose(self.job, self._ask(self._stubs, lambda stub: stub.Status.future, request, deadline))

    @contextmanager
    def _reserved(
        self, source: Source, deadline: float, at_least: int
    ) -> Iterator[tuple[int, Mapping[int, str | None]]]:
        """An iteration, and for each node that it is reserved there (`None`) or why not."""
        newest = source.stepped
        for margin in _MARGINS:
            iteration = max(newest + margin, at_least, 0)
            answers = self._reserve(source, iteration, deadline)
            granted = {
                node: answer for node, answer in answers.items() if answer is None or isinstance(answer, str)
            }
            if all(any(granted.get(n, "") is None for n in nodes) for nodes in source.holders.values()):
                try:
                    yield iteration, granted
                finally:
                    self._release(iteration, [n for n, a in granted.items() if a is None], source)
                return
            self._release(iteration, [node for node, answer in granted.items() if answer is None], source)
            newest = max([newest, *(a for a in answers.values() if isinstance(a, int))])
        raise lacking(
            self.job,
            {
                shard: [
                    (n, granted.get(n) or "goes on faster than iterations can be reserved") for n in nodes
                ]
                for shard, nodes in source.holders.items()
                if all(granted.get(n, "") is not None for n in nodes)
            },
        )

    def _reserve(self, source: Source, iteration: int, deadline: float) -> dict[int, int | str | None]:
        """For each node: `None`, granted; a number, what it has stepped instead; a text, no answer."""
        left = deadline - time.monotonic()
        request = pb.ReserveRequest(job=self.job.job, iteration=iteration, seconds=left + ANSWER_SECONDS)
        asked = {node: self._stubs[node] for node in source.nodes if node not in source.fenced}
        answers = self._ask(asked, lambda stub: stub.Reserve.future, request, deadline)
        found: dict[int, int | str | None] = dict.fromkeys(source.fenced)
        for node, answer in answers.items():
            found[node] = answer if isinstance(answer, str) else None if answer.granted else answer.stepped
        return found

    def _release(self, iteration: int, nodes: Sequence[int], source: Source) -> None:
        request = pb.ReleaseRequest(job=self.job.job, iteration=iteration)
        stubs = {node: self._stubs[node] for node in nodes if node not in source.fenced}
        self._ask(stubs, lambda stub: stub.Release.future, request, time.monotonic() + ANSWER_SECONDS)

    def _fetch_all(
        self, source: Source, iteration: int, granted: Mapping[int, str | None], deadline: float
    ) -> Snapshot:
        able = {
            shard: [n for n in nodes if granted.get(n, "") is None] for shard, nodes in source.holders.items()
        }
        found: dict[Shard, _Fetched] = {}
        troubles: dict[Shard, list[tuple[int, str]]] = {}
        wrong: set[Shard] = set()

        def fetch(shard: Shard) -> None:
            for node in able[shard]:
                try:
                    found[shard] = self._fetch(node, shard, source, iteration, deadline)
                    return
                except (state.StateError, grpc.RpcError) as error:
                    troubles.setdefault(shard, []).append((node, _reason(error)))
                    if isinstance(error, state.StateError):
                        wrong.add(shard)

        with ThreadPoolExecutor(len(able), thread_name_prefix="fetch") as pool:
            list(pool.map(fetch, able))
        failed = {shard: troubles.get(shard, []) for shard in able if shard not in found}
        if failed:
            raise lacking(self.job, failed, wrong & failed.keys())
        groups = tuple(
            _one_group(group, [found[shard] for shard in sorted(found) if shard[0] == group])
            for group in range(len(self.job.dp_groups))
        )
        return Snapshot(self.job, source.run, iteration, groups)

    def _fetch(self, node: int, shard: Shard, source: Source, iteration: int, deadline: float) -> _Fetched:
        """A shard from one node; `StateError` where it is another one, or damaged."""
        request = pb.FetchRequest(
            job=self.job.job, shard=pb.Shard(group=shard[0], shard=shard[1]), iteration=iteration
        )
        stream = self._stubs[node].Fetch(request, timeout=max(deadline - time.monotonic(), 0.1))
        stepped = threading.Timer(STEP_SECONDS, stream.cancel)
        stepped.start()
        try:
            reader = state.from_seeds(stream)
        finally:
            stepped.cancel()
        _check(reader.header, self.job, shard, source, iteration)
        states: States = {}
        for number, tensor, values in reader:
            states[number] = (tensor, values)
            self._progress(sum(v.nbytes for v in (tensor, *values.values()) if isinstance(v, torch.Tensor)))
        return _Fetched(reader.header, states)

    def _ask(
        self,
        stubs: Mapping[int, ShadowStub],
        method: Callable[[ShadowStub], Any],
        request: Any,
        deadline: float,
    ) -> dict[int, Any]:
        """All of them at once; a text where one gives no answer."""
        timeout = max(min(ANSWER_SECONDS, deadline - time.monotonic()), 0.1)
        calls = {node: method(stub)(request, timeout=timeout) for node, stub in stubs.items()}
        found: dict[int, Any] = {}
        for node, call in calls.items():
            try:
                found[node] = call.result()
            except grpc.RpcError as error:
                found[node] = _reason(error)
        return found


@dataclass(frozen=True)
class _Fetched:
    header: pb.SeedHeader
    states: States


def _check(header: pb.SeedHeader, job: Job, shard: Shard, source: Source, iteration: int) -> None:
    """`StateError` where a stream is of another job, shard, run, incarnation or iteration."""
    check_header(header, Asked(job.job, source.run, iteration, *shard, source.incarnation))
    ranks = len(job.dp_groups[shard[0]].ranks)
    parts = [(part.position, part.iteration) for part in header.record.parts]
    if header.parameters and parts != [(position, iteration) for position in range(ranks)]:
        raise state.StateError(f"it has no whole step record of iteration {iteration}")


def _one_group(group: int, shards: Sequence[_Fetched]) -> GroupState:
    """A DP group's shards together; `Lacking` where they are of different models."""
    headers = [shard.header for shard in shards]
    first = most_parts(headers)
    for header in headers:
        if (header.layout, header.optimizer) != (first.layout, first.optimizer):
            here, there = ((group, one.shard.shard) for one in (header, first))
            trouble = f"{name(here)} is of another model or optimizer than {name(there)}"
            raise Lacking({here: [trouble]}, frozenset({here}))
    states = {number: values for shard in shards for number, values in shard.states.items()}
    record, without = record_of(headers)
    if without:
        trouble = f"{without[0]} and {len(without) - 1} other buffers or frozen parameters have not come yet"
        raise Lacking({(group, first.shard.shard): [trouble]})
    return GroupState(from_json(first.layout), first.optimizer, record, first.names, states)


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    if not isinstance(error, grpc.Call):
        return str(error) or type(error).__name__
    code, detail = error.code(), next(iter(str(error.details() or "").splitlines()), "")
    if code == grpc.StatusCode.CANCELLED:
        return f"the iteration was not stepped within {STEP_SECONDS:g} s"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "gave no answer in time"
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return "another service than a shadow node's is there"
    if code == grpc.StatusCode.UNAVAILABLE:
        return f"can't be reached{unreached(detail)}"
    return f"{code.name}{detail and ': '}{detail}"


def unreached(detail: str) -> str:
    """Of what gRPC says of a connection, only why, if that is found: ` (Connection refused)`."""
    found = _ROOT.search(detail)
    why = found["why"] if found else detail
    return f" ({why})" if why else ""
