"""What is done to a game day's processes, links and disks, and what follows from that. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.gameday.parties import PARTIES, SWITCHES

SEEDED = 0.8
"""Seconds that a restarted node needs at least to be seeded: it starts, and joins 3 iterations ahead."""


@dataclass(frozen=True)
class Act:
    """One act, `at` seconds after its incident began.

    Attributes:
        at: When it begins.
        kind: kill, stall, down (a link) or fill (a disk).
        who: `ddp.rank0`, `ddp.shadow1`, `tor0`, `ctl0`, `primary`, `tor0-tor1`; `ddp.disk`, which has its
            checkpoints; `ddp.events`, which has the event log of its node 0.
        seconds: Until it is undone; a rank that was killed is restarted at once.
    """

    at: float
    kind: str
    who: str
    seconds: float = 0.0

    @property
    def job(self) -> str:
        """The job that it is about, or ""."""
        return self.who.partition(".")[0] if "." in self.who else ""

    @property
    def part(self) -> str:
        """What it is about within the job: `rank0`, or the whole name."""
        return self.who.rpartition(".")[2]

    @property
    def node(self) -> int | None:
        """The id of the shadow node that it is about, if it is about one."""
        return int(self.part.removeprefix("shadow")) if self.part.startswith("shadow") else None

    @property
    def end(self) -> float:
        """When it is undone."""
        return self.at + self.seconds

    def __str__(self) -> str:
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.kind} {self.who}{lasts}"


@dataclass(frozen=True)
class Incident:
    """Acts that belong together, with all else well before and after."""

    name: str
    acts: tuple[Act, ...] = field(default_factory=tuple)

    @property
    def disk(self) -> frozenset[str]:
        """The jobs that resume from disk: a rank dies while a shard has lost both holders."""
        kills = [act for act in self.acts if act.kind == "kill" and act.part.startswith("rank")]
        return frozenset(act.job for act in kills if lost_shards(self.acts, act.job, act.at))

    def __str__(self) -> str:
        acts = "; ".join(f"{act.at:g} s: {act}" for act in self.acts)
        expects = f" (expects the disk: {', '.join(sorted(self.disk))})" if self.disk else ""
        return f"{self.name}: {acts}{expects}"


def lost_shards(acts: Sequence[Act], job: str, at: float) -> list[tuple[int, int]]:
    """Return the shards, by DP group and number, all of whose holders have lost them at a time."""
    empty = {
        act.node
        for act in acts
        if act.kind == "kill" and act.job == job and act.node is not None and act.at <= at < act.end + SEEDED
    }
    return [shard for shard, holders in PARTIES[job].shards().items() if holders <= empty]


def unsound(acts: Sequence[Act], job: str) -> set[int]:
    """Return the nodes of a job that may lose state in one of the acts.

    A switch that dies, or a cable between two, may lose copies for all nodes, because the switches forward
    copies to each other.
    """
    nodes: set[int] = set()
    for act in acts:
        if act.job == job and act.node is not None and act.kind in ("kill", "down"):
            nodes.add(act.node)
        is_of_switches = (act.kind == "kill" and act.who in SWITCHES) or (
            act.kind == "down" and "-" in act.who
        )
        if is_of_switches and PARTIES[job].by_switch:
            nodes.update(PARTIES[job].nodes)
    return nodes


def together_down(acts: Sequence[Act], names: frozenset[str]) -> Iterator[tuple[float, float]]:
    """Yield the times from and to which all of these were killed at once."""
    spans = {name: [(a.at, a.end) for a in acts if a.kind == "kill" and a.who == name] for name in names}
    starts = sorted({start for periods in spans.values() for start, _ in periods})
    for start in starts:
        ends = [[end for begin, end in periods if begin <= start < end] for periods in spans.values()]
        if all(ends):
            yield start, min(max(ends_of_name) for ends_of_name in ends)
