"""`checkmate status` of jobs with copies by hosts, which have no switches: what their shadow nodes have."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from rich.text import Text

from checkmate.base.wording import JSON_VERSION, shortened, size
from checkmate.cli.common import UsageFault, err, out, readable_role
from checkmate.job.schema import Job
from checkmate.keys.access import access
from checkmate.nodes.standing import lag, node_name
from checkmate.nodes.stubs import Stubs
from checkmate.output.consoles import spinner_or_line
from checkmate.output.tables import FittedTable
from checkmate.rpc import shadow_pb2 as pb

POLL_SECONDS: Final = 0.2
LATE_SECONDS: Final = 1.0
"""A shard that has been more than one iteration behind for this time is marked."""

Answers = Mapping[int, pb.NodeStatus | str]
"""By node: its status, or why it has not answered."""


class NodesNotReady(UsageFault):
    """`--wait` timed out, or a node does not answer; `data` has the status at that time."""

    def __init__(self, message: str, exit_code: int, status: Mapping[str, object]) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.data = {"status": {"version": JSON_VERSION, **status}}


def read_nodes(jobs: Sequence[Job], seconds: float) -> dict[str, Answers]:
    """Ask all nodes, until all streams are connected or the time is up. Return their answers, by job."""
    deadline = time.monotonic() + seconds
    with ExitStack() as opened, spinner_or_line(err, "asking the shadow nodes"):
        stubs = {job.job: opened.enter_context(_stubs(job)) for job in jobs}
        while True:
            answers: dict[str, Answers] = {name: of_job.statuses() for name, of_job in stubs.items()}
            if time.monotonic() >= deadline or all(map(_is_connected, answers.values())):
                return answers
            time.sleep(POLL_SECONDS)


def check_nodes(
    jobs: Sequence[Job],
    answers: Mapping[str, Answers],
    data: Mapping[str, object],
    *,
    wait: bool,
    hint: Callable[[], str],
) -> None:
    """Raise `NodesNotReady` if a node has not answered, or, with `wait`, lacks a stream.

    `data` is the whole status, and `hint` returns the end of the message about a node without an answer.
    """
    for job in jobs:
        for node, answer in answers[job.job].items():
            if isinstance(answer, str):
                raise NodesNotReady(f"{node_name(job, node)}: {answer}{hint()}", 3, data)
        if wait and not _is_connected(answers[job.job]):
            raise NodesNotReady(
                f"job {job.job}: not all ranks are connected to all nodes that hold their part; each rank's "
                "log says why it can't connect",
                7,
                data,
            )


def _stubs(job: Job) -> Stubs:
    return Stubs(job, access(job, readable_role(job)).keys)


def _is_connected(answers: Answers) -> bool:
    return all(
        isinstance(answer, pb.NodeStatus)
        and bool(answer.holds)
        and all(hold.connected == hold.streams for hold in answer.holds)
        for answer in answers.values()
    )


def show_nodes(jobs: Sequence[Job], answers: Mapping[str, Answers]) -> None:
    """Print a table of the shards of each job, by node, and what steps have waited for each node."""
    for job in jobs:
        columns, numbers = ("group", "shard", "node", "state", "ranks"), _NUMBERS
        title = f"job {job.job}, copies by hosts"
        table = FittedTable(title, *columns, *numbers, numbers=numbers, folds=("state",))
        empty = [""] * len(numbers)
        for node, answer in sorted(answers[job.job].items()):
            if isinstance(answer, str):
                table.add_row("", "", str(node), Text(shortened(answer), "red"), "", *empty)
                continue
            for hold in sorted(answer.holds, key=lambda hold: (hold.shard.group, hold.shard.shard)):
                table.add_row(*_row(node, answer, hold))
            if not answer.holds:
                table.add_row("", "", str(node), Text("waits for training", "yellow"), "", *empty)
        out.print(table)
        troubles = [
            f"{node_name(job, node)}: {shortened(trouble)}"
            for node, answer in sorted(answers[job.job].items())
            if isinstance(answer, pb.NodeStatus)
            for trouble in answer.trouble
        ]
        for trouble in troubles:
            out.print(trouble, soft_wrap=True, markup=False)


_NUMBERS: Final = ("iteration", "behind", "for", "left out", "waited", "bytes")
"""Columns of a shard: its last step; iterations behind trainers, and for how long; iterations that ranks left
out; seconds that steps waited for its node; bytes received."""


def _row(node: int, status: pb.NodeStatus, hold: pb.HoldStatus) -> tuple[str | Text, ...]:
    state = Text("live", "green") if hold.live else Text("not live", "yellow")
    if hold.trouble:
        state = Text(f"{state.plain}: {shortened(hold.trouble)}", "yellow")
    is_whole = hold.connected == hold.streams
    connected = Text(f"{hold.connected} of {hold.streams}", "" if is_whole else "yellow")
    behind, late = lag(hold), "" if hold.lag_seconds < LATE_SECONDS else "yellow"
    return (
        *(str(hold.shard.group), str(hold.shard.shard), str(node), state, connected, str(hold.stepped)),
        Text(f"{behind:,}", late),
        Text(f"{hold.lag_seconds:.1f} s", late),
        Text(f"{hold.left_out:,}", "yellow" if hold.left_out else ""),
        f"{status.waited_seconds:.2f} s",
        size(hold.bytes),
    )


def node_data(answers: Mapping[str, Answers]) -> dict[str, Any]:
    """Return the answers as `--json` shows them, by job and node."""
    return {
        job: {
            str(node): {"error": answer}
            if isinstance(answer, str)
            else {
                "holds": [_hold_data(hold) for hold in answer.holds],
                "waited_seconds": answer.waited_seconds,
                "troubles": list(answer.trouble),
            }
            for node, answer in sorted(of_job.items())
        }
        for job, of_job in answers.items()
    }


def _hold_data(hold: pb.HoldStatus) -> dict[str, object]:
    return {
        "dp_group": hold.shard.group,
        "shard": hold.shard.shard,
        "live": hold.live,
        "streams": hold.streams,
        "connected": hold.connected,
        "stepped": hold.stepped,
        "in_full": hold.in_full,
        "lag": lag(hold),
        "lag_seconds": hold.lag_seconds,
        "left_out": hold.left_out,
        "repairs": hold.repairs,
        "repair_bytes": hold.repair_bytes,
        "bytes": hold.bytes,
        "trouble": hold.trouble,
    }
