"""The raw data of a cell, as they are kept: what all figures are made of. Pure.

Times are in seconds since the job's start, to a tenth of a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

from pydantic import ConfigDict, TypeAdapter

_DIGITS: Final = 4
CONDITIONS: Final = ("commit", "machine", "file_system")
"""The attributes of a record that are the same for all systems of a round."""
Log = Sequence[Mapping[str, Any]]
"""The lines that a rank has appended to its file."""


class TrainedStep(NamedTuple):
    """A trained iteration. `share` is that of the ranks that took part."""

    iteration: int
    began: float
    ended: float
    share: float = 1.0


class MeasuredBlock(NamedTuple):
    """Iterations with a system, undisturbed: seconds, bytes written and bytes sent for each; means."""

    seconds: float
    written: float
    sent: float


@dataclass(frozen=True)
class Record:
    """A measured cell.

    Attributes:
        steps: Those of rank 0, or of the whole job if its ranks come and go. Only with kills.
        interval: The number of iterations from one checkpoint to the next, at the end.
        kills: When ranks were killed.
        ended: When the period with kills ended, or the job. Steps after it show what the last kill cost.
        losses: The last loss of each of the first iterations, by rank.
        system: By rank, a block of iterations with the system.
        plain: The seconds of an iteration without it, in the same process; of rank 0.
        peaks: The peak resident bytes of each rank, without its twin.
        helpers: The peak resident bytes of each shadow node.
        file_system: The type of that to which checkpoints go.
    """

    __pydantic_config__: ClassVar = ConfigDict(ser_json_inf_nan="constants")

    commit: str
    day: str
    machine: str
    file_system: str
    steps: tuple[TrainedStep, ...] = ()
    interval: int = 0
    kills: tuple[float, ...] = ()
    ended: float = 0.0
    losses: tuple[tuple[float, ...], ...] = ()
    system: tuple[MeasuredBlock, ...] = ()
    plain: float = 0.0
    peaks: tuple[int, ...] = ()
    helpers: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return one line of JSON."""
        return _RECORD.dump_json(self).decode()


_RECORD: Final = TypeAdapter(Record)


def steps_of(logs: Sequence[Log], origin: float, *, alone: bool) -> tuple[TrainedStep, ...]:
    """Return the iterations of rank 0; with `alone`, of any rank, at its earliest end."""
    if not alone:
        return tuple(_step(line, origin) for log in logs[:1] for line in _trained_lines(log))
    earliest: dict[int, TrainedStep] = {}
    for log in logs:
        for line in _trained_lines(log):
            step = _step(line, origin)
            earlier = earliest.get(step.iteration)
            if earlier is None or step.ended < earlier.ended:
                earliest[step.iteration] = step
    return tuple(earliest[iteration] for iteration in sorted(earliest))


def missing_after(kill: float, steps: Iterable[TrainedStep]) -> int:
    """Return the iteration that training has to reach again to be where it was."""
    return max((step.iteration + 1 for step in steps if step.ended <= kill), default=0)


def has_regained(kills: Iterable[float], steps: Sequence[TrainedStep]) -> bool:
    """Return whether training has come back to where it was before each kill."""
    return all(
        any(step.began > kill and step.iteration >= missing for step in steps)
        for kill, missing in ((kill, missing_after(kill, steps)) for kill in kills)
    )


def losses_of(logs: Sequence[Log], iterations: int) -> tuple[tuple[float, ...], ...]:
    """Return the last loss of each of the first iterations, by rank."""
    losses = []
    for log in logs:
        last = {line["iteration"]: line["loss"] for line in _trained_lines(log)}
        losses.append(tuple(last[iteration] for iteration in sorted(last) if iteration < iterations))
    return tuple(losses)


def blocks_of(logs: Sequence[Log]) -> tuple[MeasuredBlock, ...]:
    """Return each rank's block with the system."""
    lines = [line for log in logs for line in log if line.get("block") == "system"]
    return tuple(
        MeasuredBlock(
            round(record_line["seconds"], _DIGITS), round(record_line["written"]), round(record_line["sent"])
        )
        for record_line in lines
    )


def plain_of(logs: Sequence[Log]) -> float:
    """Return the seconds of an iteration without the system, of rank 0."""
    return float(next(round(line["seconds"], _DIGITS) for line in logs[0] if line.get("block") == "plain"))


def peaks_of(logs: Sequence[Log]) -> tuple[int, ...]:
    """Return the last peak that each rank has said."""
    return tuple([line["peak"] for line in log if "peak" in line][-1] for log in logs)


def interval_of(logs: Sequence[Log]) -> int:
    """Return the interval that the system had at the end."""
    return max((int(line["interval"]) for log in logs for line in log if "interval" in line), default=0)


def log_of(text: str) -> Log:
    """Return the lines of a rank's file. A rank that is killed may leave a part of one."""
    return [data for line in text.splitlines() if (data := parse_line(line)) is not None]


def parse_line(line: str) -> dict[str, Any] | None:
    """Return a line of a rank's file, or `None` if it is not a whole one."""
    try:
        data: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return data


def since(times: Iterable[float], origin: float) -> tuple[float, ...]:
    """Return times since the job's start."""
    return tuple(round(time - origin, _DIGITS) for time in times)


def _trained_lines(log: Log) -> list[Mapping[str, Any]]:
    return [line for line in log if "iteration" in line]


def _step(line: Mapping[str, Any], origin: float) -> TrainedStep:
    began, end = since((line["began"], line["at"]), origin)
    return TrainedStep(line["iteration"], began, end, line.get("share", 1.0))
