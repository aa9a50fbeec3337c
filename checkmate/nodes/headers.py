"""Checks the headers of shards that holders send against the request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import StateError
from checkmate.wire.layout import Layout, LayoutError, from_json


@dataclass(frozen=True)
class Asked:
    """A request for one shard of a job's DP group at an iteration of a run.

    Without `incarnation` or `start`, any is accepted. Without `parameters`, all of the shard's are requested.
    """

    job: str
    run: str
    iteration: int
    group: int
    shard: int
    incarnation: int | None = None
    start: bytes | None = None
    parameters: tuple[int, ...] = ()


def check_header(header: pb.SeedHeader, asked: Asked) -> Layout:
    """Return the layout of a stream of seeds. Raise `StateError` if it is not the requested shard."""
    there = Asked(
        header.job,
        header.run,
        header.iteration,
        header.shard.group,
        header.shard.shard,
        None if asked.incarnation is None else header.incarnation,
        None if asked.start is None else header.start,
        asked.parameters,
    )
    if there != asked:
        ours, theirs = _shown(asked), _shown(there)
        raise StateError(f"it sent {theirs}, not {ours if ours != theirs else 'of the requested start'}")
    try:
        layout = from_json(header.layout)
    except LayoutError as error:
        raise StateError(str(error)) from None
    if sorted(header.parameters) != sorted(asked.parameters or layout.of_shard(asked.shard)):
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


def _shown(asked: Asked) -> str:
    incarnation = "" if asked.incarnation is None else f" (incarnation {asked.incarnation})"
    return (
        f"shard {asked.shard} of DP group {asked.group} at iteration {asked.iteration} of job {asked.job}, "
        f"run {asked.run}{incarnation}"
    )
