"""The oracle of alerts: which must fire because of what was done, which may, and that no other does. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tests.gameday.acts import Act, lost_shards, together_down
from tests.gameday.parties import CONTROLLERS, PARTIES, SWITCHES
from tests.gameday.rules import Delays

RECOVERY: Final = 40.0
"""Seconds for everything to be well again after the last act is undone, and to be seen as well."""
SURE: Final = 6.0
"""Seconds by which a condition must outlast the delay of its alert, so that it fires in any case."""
_LOSS_SECONDS: Final = 4.0
"""Seconds in which a node that is away misses copies in any case, if its job trains."""


_BEHIND: Final = 25.0
"""Seconds in which a job trains more than three intervals of checkpoints in any case."""
_LABELS_SHOWN: Final = ("job", "dp_group", "shard", "node", "switch", "error")


def _text(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}({', '.join(f'{key} {value}' for key, value in sorted(labels.items()))})"


@dataclass(frozen=True)
class Alarm:
    """An alert that fired from one time to another, with its labels."""

    at: float
    until: float
    name: str
    labels: Mapping[str, str]

    @property
    def short(self) -> str:
        """The alert without the labels that tell streams and controllers apart."""
        return _text(self.name, {key: self.labels[key] for key in _LABELS_SHOWN if key in self.labels})

    def __str__(self) -> str:
        return _text(self.name, self.labels)


@dataclass(frozen=True)
class Expectation:
    """An alert that must fire, or that may, between two times; with these labels among its own."""

    name: str
    labels: Mapping[str, str]
    since: float
    until: float
    must: bool

    def explains(self, alarm: Alarm) -> bool:
        """Return whether an alert may have begun to fire because of this."""
        return self._is_of(alarm) and self.since <= alarm.at <= self.until

    def met_by(self, alarm: Alarm) -> bool:
        """Return whether an alert fired in time; it may have begun with an earlier incident."""
        return self._is_of(alarm) and alarm.at <= self.until and self.since <= alarm.until

    def _is_of(self, alarm: Alarm) -> bool:
        return alarm.name == self.name and self.labels.items() <= alarm.labels.items()

    def __str__(self) -> str:
        return _text(self.name, self.labels)


def judge(expected: Sequence[Expectation], alarms: Sequence[Alarm]) -> list[str]:
    """Return a problem for each alert that should have fired and did not, and for each other one that did."""
    missing = [
        expectation
        for expectation in expected
        if expectation.must and not any(expectation.met_by(alarm) for alarm in alarms)
    ]
    extra = [alarm for alarm in alarms if not any(expectation.explains(alarm) for expectation in expected)]
    return [f"did not fire, after {expectation.since:.0f} s: {expectation}" for expectation in missing] + [
        f"fired without a cause, at {alarm.at:.0f} s: {alarm}" for alarm in extra
    ]


def expectations(
    acts: Sequence[Act], delays: Mapping[str, Delays], names: Mapping[str, str]
) -> list[Expectation]:
    """Return what is expected of the alerts after the acts of one incident.

    Args:
        acts: As they were done, in seconds since the game day began.
        delays: Of each alert.
        names: The name of each job in labels.
    """
    return list(_Reasons(acts, delays, names).all())


class _Reasons:
    """What follows from the acts of an incident."""

    def __init__(self, acts: Sequence[Act], delays: Mapping[str, Delays], names: Mapping[str, str]) -> None:
        self._acts, self._delays, self._names = acts, delays, names
        self._end_time = max((act.end for act in acts), default=0.0) + RECOVERY

    def all(self) -> Iterator[Expectation]:
        for act in self._acts:
            if act.node is not None and not PARTIES[act.job].by_switch:
                yield self._may("CheckmateIterationsLeftOut", act, self._of_node(act))
                yield self._may("CheckmateStepsWait", act, self._of_node(act))
            if act.kind == "kill" and act.node is not None:
                if PARTIES[act.job].by_switch:  # only a switch counts what a node does not take
                    yield self._copies_lost(act)
            elif act.kind == "down" and act.node is not None:
                if PARTIES[act.job].by_switch:
                    yield self._may("CheckmateCopiesLost", act, self._of_node(act))
                yield self._may("CheckmateStreamsMissing", act, self._of_node(act))
            elif act.kind == "down":
                yield self._may("CheckmateCopiesLost", act)
            elif act.kind == "kill" and act.who in SWITCHES:
                yield from self._switch(act)
            elif act.kind == "fill" and act.part == "disk":
                labels, late = {"job": self._names[act.job]}, act.at + _BEHIND
                yield from self._fires_after(
                    "CheckmateCheckpointsBehind", late, act.end, labels, since=act.at
                )
        yield from self._controllers()
        for job in PARTIES:
            yield from self._shards(job)

    def _of_node(self, act: Act) -> dict[str, str]:
        return {"job": self._names[act.job], "node": str(act.node)}

    def _copies_lost(self, act: Act) -> Expectation:
        """A node was killed: the switch counts copies for it if its job trains meanwhile."""
        stops = [
            a for a in self._acts if a.job in (act.job, "") and a.node is None and a.who not in CONTROLLERS
        ]
        must = act.seconds > _LOSS_SECONDS and not stops
        return self._expectation("CheckmateCopiesLost", act.at, self._of_node(act), must=must)

    def _switch(self, act: Act) -> Iterator[Expectation]:
        """A switch was away: copies that others forwarded to it are lost, and nodes join again."""
        at = {"switch": act.who}
        for alert in ("CheckmateSwitchDown", "CheckmateNoPrimaryController"):
            yield from self._fires_after(alert, act.at, act.end, at)
        yield self._may("CheckmateCopiesLost", act)
        yield self._may("CheckmateWritesRefused", act, at)
        if act.seconds > self._delays["CheckmateStreamsMissing"].waits - SURE:
            yield self._may("CheckmateStreamsMissing", act)
            yield self._may("CheckmateShardBehind", act)
            yield self._may("CheckmateShardWithoutHolder", act)

    def _controllers(self) -> Iterator[Expectation]:
        for start, end in together_down(self._acts, frozenset(CONTROLLERS)):
            for labels in ({}, *({"switch": switch} for switch in SWITCHES)):
                yield from self._fires_after("CheckmateNoPrimaryController", start, end, labels)

    def _shards(self, job: str) -> Iterator[Expectation]:
        """Shards that have lost both holders: the alert fires if that lasts."""
        for (group, shard), holders in PARTIES[job].shards().items():
            labels = {"job": self._names[job], "dp_group": str(group), "shard": str(shard)}
            both = frozenset(f"{job}.shadow{node}" for node in holders)
            for start, end in together_down(self._acts, both):
                yield from self._fires_after("CheckmateShardWithoutHolder", start, end, labels)
        kills = [a for a in self._acts if a.kind == "kill" and a.job == job and a.part.startswith("rank")]
        for act in kills:  # nodes that are empty wait for training, which starts again
            for group, shard in lost_shards(self._acts, job, act.at):
                labels = {"job": self._names[job], "dp_group": str(group), "shard": str(shard)}
                yield self._may("CheckmateShardWithoutHolder", act, labels)

    def _fires_after(
        self, name: str, start: float, end: float, labels: Mapping[str, str], since: float | None = None
    ) -> Iterator[Expectation]:
        """Yield that an alert fires if a condition lasted long enough, or that it may if it nearly did.

        The condition may have begun earlier, `since` then.
        """
        waits, since = self._delays[name].waits, start if since is None else since
        if end - since >= waits - SURE:
            yield self._expectation(name, since, labels, must=end - start >= waits + SURE)

    def _may(self, name: str, act: Act, labels: Mapping[str, str] = MappingProxyType({})) -> Expectation:
        return self._expectation(name, act.at, labels, must=False)

    def _expectation(self, name: str, since: float, labels: Mapping[str, str], *, must: bool) -> Expectation:
        times = self._delays[name]
        return Expectation(name, labels, since, self._end_time + times.waits + times.remembers, must)
