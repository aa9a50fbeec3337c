"""Calls that NCCL made to its plugins in a ring AllReduce, as recorded (tests/data/nccl/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkmate.wire.nccl_slicing import NcclSlicing

FOLDER: Final = Path(__file__).resolve().parents[2] / "data" / "nccl"
NAMES: Final = sorted(
    str(file.relative_to(FOLDER)).removesuffix(".jsonl.gz") for file in FOLDER.rglob("*.jsonl.gz")
)
ITEMSIZES: Final = {"ncclUint32": 4, "ncclFloat32": 4}


@dataclass(frozen=True)
class TracedCollective:
    """A collective as the profiler was told of it.

    `channels` carry it; in NCCL 2.26, they are those that may.
    """

    count: int
    datatype: str
    channels: int


@dataclass(frozen=True)
class TracedSend:
    """A send that was accepted, and the first word that it carried, if any."""

    channel: int
    step: int
    nbytes: int
    first_word: int | None


@dataclass(frozen=True)
class Trace:
    """All calls of one run, by rank."""

    name: str
    header: Mapping[str, Any]
    events: tuple[list[list[Any]], ...]

    @classmethod
    def read(cls, name: str) -> Trace:
        """Read a recorded run."""
        with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt") as lines:
            header, *ranks = map(json.loads, lines)
        return cls(name, header, tuple(rank["ev"] for rank in ranks))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.header["nranks"])

    @property
    def channels(self) -> int:
        """The most channels of a collective."""
        return int(self.header["nchannels"])

    @property
    def release(self) -> str:
        """The release of NCCL, such as `2.30`."""
        return ".".join(self.header["nccl"].split(".")[:2])

    @property
    def slicing(self) -> NcclSlicing:
        """NCCL's slicing in this release and with this buffer."""
        cell = 16 << 10 if self.release in ("2.29", "2.30") else 8 << 10
        return NcclSlicing(cell, int(self.header["buffsize"]))

    @property
    def whole(self) -> bool:
        """Whether all collectives came to their end."""
        return "senderr" not in self.name

    def alone(self, rank: int) -> dict[int, TracedCollective]:
        """Return the collectives that were launched alone, by the profiler's number."""
        collectives = [event[2:] for event in self.events[rank] if event[0] == "Coll"]
        groups = [collective[2] for collective in collectives]
        return {
            number: TracedCollective(count, datatype, channels)
            for number, _, group, _, _, count, datatype, _, _, channels, *_ in collectives
            if groups.count(group) == 1
        }

    def sends(self, rank: int, collective: int) -> list[TracedSend]:
        """Return the accepted sends of a collective."""
        return [
            TracedSend(channel, step, size, words[0] if words else None)
            for kind, _, _, size, _, _, coll, channel, step, was_refused, *words in (
                event for event in self.events[rank] if event[0] == "isend"
            )
            if coll == collective and not was_refused
        ]

    def decode(self, word: int) -> tuple[int, list[int]]:
        """Return the element and the ranks of a partial sum: rank r's element i is (i << 5) + (1 << r)."""
        in_it = [rank for rank in range(self.ranks) if word >> rank & 1]
        return (word >> 5) // len(in_it), in_it
