"""Reads and verifies shards from shadow nodes, in parallel, from another holder if one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import grpc
import torch

from checkmate import state
from checkmate.nodes.standing import Lacking, Shard, lacking
from checkmate.nodes.stubs import ANSWER_SECONDS, Stubs, reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.state import StateError
from checkmate.wire.layout import Layout, from_json
from checkmate.wire.parameter import LayoutError

_MARGINS: Final = (0, 1, 2, 4, 8)
"""How many iterations to reserve ahead of the newest one, in successive attempts."""
_TOO_FAST: Final = "advances faster than iterations can be reserved"


@dataclass
class NotReserved(Exception):
    """No iteration could be reserved on enough nodes. `refusals`: the reasons, by node."""

    refusals: Mapping[int, str]

    def __str__(self) -> str:
        return "; ".join(f"shadow node {node}: {why}" for node, why in sorted(self.refusals.items()))


@dataclass(frozen=True)
class Reservation:
    """An iteration, and the nodes that keep it readable. `refusals`: the reasons of the others, by node."""

    iteration: int
    granted: frozenset[int]
    refusals: Mapping[int, str]


@contextmanager
def reserved(
    stubs: Stubs,
    nodes: Collection[int],
    seconds: float,
    *,
    newest: int | None = None,
    at_least: int = 0,
    enough: Callable[[Collection[int]], bool] | None = None,
) -> Iterator[Reservation]:
    """Reserve the newest iteration that enough nodes grant, and release it at the end of the block.

    Args:
        stubs: Stubs of the job's nodes.
        nodes: The nodes to ask.
        seconds: The time after which nodes release the iteration on their own.
        newest: The newest iteration that the nodes have stepped; `None` to ask them.
        at_least: The lowest iteration to reserve.
        enough: Returns whether these nodes are enough; by default all are required.

    Raises:
        NotReserved: Too few nodes have granted any iteration.
    """
    enough = enough or (lambda granted: len(granted) == len(nodes))
    refusals: Mapping[int, str] = {}
    stepped = -1 if newest is None else newest
    for margin in _MARGINS if newest is not None else (0, *_MARGINS):
        iteration = max(stepped + margin, at_least, 0)
        request = pb.ReserveRequest(job=stubs.job.job, iteration=iteration, seconds=seconds)
        answers = stubs.ask(nodes, lambda stub: stub.Reserve, request, min(seconds, ANSWER_SECONDS))
        refusals = {node: why for node, answer in answers.items() if (why := _refusal(answer))}
        granted = frozenset(answers.keys() - refusals.keys())
        try:
            if enough(granted):
                yield Reservation(iteration, granted, refusals)
                return
        finally:
            release = pb.ReleaseRequest(job=stubs.job.job, iteration=iteration)
            stubs.ask(granted, lambda stub: stub.Release, release)
        stepped = max(
            [stepped, *(granting.stepped for granting in answers.values() if not isinstance(granting, str))]
        )
        if stepped < 0:
            break  # no hold is live: no later iteration would be granted either
    raise NotReserved(refusals)


def _refusal(answer: pb.ReserveReply | str) -> str:
    """Return why a node has refused a reservation, or ""."""
    if isinstance(answer, str):
        return answer
    return "" if answer.granted else _TOO_FAST


@dataclass(frozen=True)
class ShardRequest:
    """A request for one shard of a job's DP group at an iteration of a run.

    Without `incarnation` or `start`, any is accepted. Without `parameters`, all of the shard's are requested;
    if there are none, only the header is, with the step record.
    """

    job: str
    run: str
    iteration: int
    group: int
    shard: int
    incarnation: int | None = None
    start: bytes | None = None
    parameters: tuple[int, ...] | None = None
    ranks: bytes = b""
    """The digest of the ranks whose state it is (`other_ranks`); empty: the job's present ones."""

    def numbers(self, layout: Layout) -> Sequence[int]:
        """Return the parameters that are requested."""
        return layout.of_shard(self.shard) if self.parameters is None else self.parameters


def check_header(header: pb.SeedHeader, request: ShardRequest) -> Layout:
    """Return the layout of a stream of seeds. Raise `StateError` if it is not the requested shard."""
    request_of_node = ShardRequest(
        header.job,
        header.run,
        header.iteration,
        header.shard.group,
        header.shard.shard,
        None if request.incarnation is None else header.incarnation,
        None if request.start is None else header.start,
        request.parameters,
        request.ranks,
    )
    if request_of_node != request:
        requested, delivered = _words_of(request), _words_of(request_of_node)
        raise StateError(
            f"it sent {delivered}, not {requested if requested != delivered else 'of the requested start'}"
        )
    try:
        layout = from_json(header.layout)
    except LayoutError as error:
        raise StateError(str(error)) from None
    if sorted(header.parameters) != sorted(request.numbers(layout)):
        raise StateError("it announced other parameters than requested")
    return layout


def most_parts(headers: Sequence[pb.SeedHeader]) -> pb.SeedHeader:
    """Return the header with the most parts of the record: a shard without parameters may lack some."""
    return max(headers, key=lambda header: len(header.record.parts))


def record_of(headers: Sequence[pb.SeedHeader]) -> tuple[pb.IterationRecord, list[str]]:
    """Return a DP group's record with the buffers of all its headers, and the names of buffers that none has.

    A node that joined late may lack buffers that another one has.
    """
    record = pb.IterationRecord()
    record.CopyFrom(most_parts(headers).record)
    for header in headers:
        for name, data in header.record.buffers.items():
            if name not in record.buffers:
                record.buffers[name] = data
    expected = {name for header in headers for name in header.buffers}
    return record, sorted(expected - record.buffers.keys())


def _words_of(request: ShardRequest) -> str:
    incarnation = "" if request.incarnation is None else f" (incarnation {request.incarnation})"
    return (
        f"shard {request.shard} of DP group {request.group} at iteration {request.iteration} "
        f"of job {request.job}, run {request.run}{incarnation}"
    )


States = dict[int, tuple[torch.Tensor, dict[str, object]]]
"""Parameters by number: the tensor, and the optimizer state."""

Accept = Callable[[pb.SeedHeader, Layout], None]
"""Checks a stream's header. After a `StateError` the next node is tried; other exceptions end the read."""

_LEAST_SECONDS: Final = 0.1


@dataclass(frozen=True)
class ShardState:
    """A shard as a node has sent it: parameters and their optimizer state, and the header."""

    header: pb.SeedHeader
    layout: Layout
    states: States


@dataclass(frozen=True)
class ShardReading:
    """How shards are read."""

    deadline: float
    """On the monotonic clock."""
    step_seconds: float | None = None
    """How long a node may take to step the iteration; a later one may never be stepped."""
    progress: Callable[[int], None] = lambda nbytes: None
    """Called with numbers of bytes as they arrive, from several threads."""
    accept: Accept = lambda header, layout: None


def read_shard(stub: ShadowStub, shard_request: ShardRequest, how: ShardReading) -> ShardState:
    """Read a shard from one node.

    Raises:
        StateError: The node sent another shard, or damaged data.
        grpc.RpcError: The call failed.
    """
    request = pb.FetchRequest(
        job=shard_request.job,
        shard=pb.Shard(group=shard_request.group, shard=shard_request.shard),
        iteration=shard_request.iteration,
        parameters=shard_request.parameters or (),
        header_only=shard_request.parameters == (),
        ranks_digest=shard_request.ranks,
    )
    stream = stub.Fetch(request, timeout=max(how.deadline - time.monotonic(), _LEAST_SECONDS))
    too_late = threading.Timer(how.step_seconds or 0, stream.cancel)
    try:
        if how.step_seconds is not None:
            too_late.start()
        reader = state.SeedReader(stream)  # the header comes once the iteration is stepped
        too_late.cancel()
        layout = check_header(reader.header, shard_request)
        how.accept(reader.header, layout)
        states: States = {}
        for number, tensor, values in reader.read(layout.parameters):
            states[number] = (tensor, values)
            how.progress(sum(v.nbytes for v in (tensor, *values.values()) if isinstance(v, torch.Tensor)))
        return ShardState(reader.header, layout, states)
    finally:
        too_late.cancel()
        stream.cancel()  # without effect if it has ended


def read_shards(
    stubs: Stubs, sources: Mapping[ShardRequest, Sequence[int]], how: ShardReading
) -> dict[Shard, ShardState]:
    """Read shards in parallel, each from the first of its nodes that provides it.

    Args:
        stubs: Stubs of the job's nodes.
        sources: The nodes of each shard, in the order in which to try them.
        how: Timeouts and callbacks.

    Raises:
        Lacking: No node provides some shard.
    """
    with ThreadPoolExecutor(max(len(sources), 1), thread_name_prefix="read") as pool:
        results = list(pool.map(lambda request: _from_any(stubs, request, sources[request], how), sources))
    failed = [result for result in results if isinstance(result, Lacking)]
    if failed:
        troubles = {shard: reasons for result in failed for shard, reasons in result.shards.items()}
        raise Lacking(troubles, frozenset(shard for result in failed for shard in result.wrong))
    reasons = zip(sources, results, strict=True)
    return {
        (request.group, request.shard): result
        for request, result in reasons
        if isinstance(result, ShardState)
    }


def _from_any(
    stubs: Stubs, request: ShardRequest, nodes: Sequence[int], how: ShardReading
) -> ShardState | Lacking:
    """Return a shard, or why no node provides it."""
    shard = (request.group, request.shard)
    troubles: list[tuple[int, str]] = []
    wrong: set[Shard] = set()
    for node in nodes:
        try:
            return read_shard(stubs.to(node), request, how)
        except state.StateError as error:
            wrong.add(shard)
            troubles.append((node, str(error)))
        except grpc.RpcError as error:
            troubles.append((node, _reason(error, how)))
    return lacking(stubs.job, {shard: troubles}, wrong)


def _reason(error: grpc.RpcError, how: ShardReading) -> str:
    cancelled = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.CANCELLED
    if cancelled and how.step_seconds is not None:
        return f"the iteration was not stepped within {how.step_seconds:g} s"
    return reason(error)
