"""Comparison of tagged bytes with those that shadow nodes read, stream by stream. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from checkmate.job.boundaries import streams
from checkmate.job.schema import Job
from checkmate.output.tables import FittedTable

StreamKey = tuple[int, int, int]
"""Boundary, channel, shadow id: a stream of the tagging rank."""
ReadKey = tuple[int, int, int, int]
"""Boundary, channel, shadow id, and the shadow node that read the stream."""
SIDES = ("first", "last")


@dataclass(frozen=True, slots=True)
class Digest:
    """A number of bytes, and their SHA-256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One shadow stream. `read` or `tagged` is `None` if that side has not reported it."""

    group: int | None
    side: int | None
    """`None` for a stream that is not of the job."""
    boundary: int
    channel: int
    shadow_id: int
    node: int
    nic: str
    tagged: Digest | None
    read: Digest | None
    shard: int | None = None
    """Of its DP group; `None` for a stream that is not of the job."""

    @property
    def equal(self) -> bool:
        """Whether both sides have the same bytes, and at least one."""
        return self.tagged is not None and self.tagged == self.read and self.tagged.nbytes > 0


@dataclass(frozen=True)
class StreamsVerdict:
    """Every stream of a job, and the ring's time."""

    rows: tuple[StreamRow, ...]
    seconds: float
    gathered: int

    @property
    def equal(self) -> bool:
        """Whether the bytes read from each stream equal the tagged ones."""
        return bool(self.rows) and all(row.equal for row in self.rows)

    @property
    def tagged(self) -> int:
        """The number of bytes tagged on all streams; copies of a stream count once."""
        return sum(
            {(r.boundary, r.channel, r.shadow_id): r.tagged.nbytes for r in self.rows if r.tagged}.values()
        )

    def data(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "equal": self.equal,
            "seconds": self.seconds,
            "gathered_bytes": self.gathered,
            "tagged_bytes": self.tagged,
            "streams": [asdict(row) | {"equal": row.equal} for row in self.rows],
        }


def compare(
    job: Job, tagged: Mapping[StreamKey, Digest], read: Mapping[ReadKey, Digest]
) -> tuple[StreamRow, ...]:
    """Return one row for each stream of the job, and for each other stream that a node has read."""
    rows = []
    for stream in streams(job):
        key = (stream.boundary.number, stream.channel, stream.shadow_id)
        nic, node = str(stream.nic.ip), stream.node.id
        place = stream.boundary.group, stream.boundary.side
        row = StreamRow(*place, *key, node, nic, tagged.get(key), read.get((*key, node)), stream.shard)
        rows.append(row)
    keys = {(row.boundary, row.channel, row.shadow_id, row.node) for row in rows}
    rows += [
        StreamRow(None, None, *key, "not of this job", None, digest)
        for key, digest in read.items()
        if key not in keys
    ]
    return tuple(sorted(rows, key=lambda row: (row.boundary, row.channel, row.shadow_id, row.node)))


def table(verdict: StreamsVerdict) -> FittedTable:
    """Return the verdict as a table, with the first ten digits of each SHA-256."""
    columns = ("group", "side", "ch", "shard", "node", "NIC", "bytes", "tagged", "read", "equal")
    streams_table = FittedTable("shadow streams", *columns, numbers=("bytes",))
    for row in verdict.rows:
        streams_table.add_row(
            "-" if row.group is None else str(row.group),
            "-" if row.side is None else SIDES[row.side],
            str(row.channel),
            "-" if row.shard is None else str(row.shard),
            str(row.node),
            row.nic,
            _bytes(row),
            _short(row.tagged),
            _short(row.read),
            Text("yes", "green") if row.equal else Text("NO", "bold red"),
        )
    return streams_table


def _bytes(row: StreamRow) -> str:
    counts: Sequence[Digest] = [digest for digest in (row.tagged, row.read) if digest is not None]
    numbers = dict.fromkeys(f"{digest.nbytes:,}" for digest in counts)
    return " / ".join(numbers) or "-"


def _short(digest: Digest | None) -> str:
    return "-" if digest is None else digest.sha256[:10]
