"""`checkmate status` of jobs with copies by switch: their streams, as the switches report them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group
from rich.status import Status
from rich.text import Text

from checkmate.base.wording import JSON_VERSION, counted, size
from checkmate.cli.common import (
    UsageFault,
    err,
    out,
)
from checkmate.job.fields import CPU_PORT
from checkmate.job.schema import Job, Switch
from checkmate.output.consoles import LateLine, spinner_or_line
from checkmate.output.tables import FittedTable
from controlplane.errors import ControlError, SwitchUnreachable
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import NoProgram, SwitchSession
from controlplane.status import SIDES, StreamStatus, SwitchStatus, read_status

POLL_SECONDS = 0.2


class StreamsNotConnected(UsageFault):
    """`--wait` timed out; `data` has the status at that time."""

    exit_code = 7

    def __init__(self, message: str, status: Mapping[str, object]) -> None:
        super().__init__(message)
        self.data = {"status": status}


class Unread(UsageFault):
    """Switches can't be read; `data` has the status of the others."""

    def __init__(self, errors: Sequence[ControlError], status: Mapping[str, object], hint: str) -> None:
        super().__init__("; ".join(map(str, errors)) + hint)
        self.exit_code = errors[0].exit_code
        self.data = {"status": status}


def read_switches(jobs: Sequence[Job], seconds: float) -> tuple[list[SwitchStatus], list[ControlError]]:
    """Ask all switches at once, until all streams are connected or the time is up.

    Return the status of each that can be read, and the errors of the others.
    """
    with spinner_or_line(err, "reading the switches") as progress:
        return asyncio.run(_status(jobs, seconds, progress))


def show_switches(statuses: Sequence[SwitchStatus]) -> None:
    """Print the streams of each switch."""
    for switch_status in statuses:
        out.print(Group(*switch_tables(switch_status), *switch_lines(switch_status)))


def check_switches(
    statuses: Sequence[SwitchStatus],
    errors: Sequence[ControlError],
    data: Mapping[str, object],
    hint: str,
    waited: float | None,
) -> None:
    """Raise the errors, or `StreamsNotConnected` for streams that were waited for.

    `data`: the whole status. `hint`: what to try after an error. `waited`: seconds, if for streams.
    """
    whole_status = {"version": JSON_VERSION, **data}
    if errors:
        raise Unread(errors, whole_status, hint)
    missing = [
        stream for switch_status in statuses for stream in switch_status.streams if not stream.connected
    ]
    if waited is not None and missing:
        raise StreamsNotConnected(_missing_line(statuses, missing, waited), whole_status)


def _absent_words(statuses: Sequence[SwitchStatus]) -> str:
    return "".join(
        f"job {job} is not installed on switch {status.switch}; "
        for status in statuses
        for job in status.not_installed
    )


def _missing_line(statuses: Sequence[SwitchStatus], missing: Sequence[StreamStatus], timeout: float) -> str:
    first = missing[0]
    streams = counted(len(missing), "stream is", "streams are")
    return (
        f"{_absent_words(statuses)}{streams} not connected after {timeout:g} s, "
        f"the first: job {first.job}, DP group {first.dp_group_name}, channel {first.channel}, "
        f"shadow id {first.shadow_id}, node {first.shadow_node} at {first.nic}{_none_words(statuses)}"
    )


def _none_words(statuses: Sequence[SwitchStatus]) -> str:
    """Return what may keep all streams of a switch away, if none of a switch is connected."""
    silent = [
        status
        for status in statuses
        if status.streams and not any(stream.connected for stream in status.streams)
    ]
    if not silent:
        return ""
    names = ", ".join(status.switch for status in silent)
    bmv2 = any(status.target == "bmv2" for status in silent)
    port = f", which BMv2 has only with --cpu-port {CPU_PORT}" if bmv2 else ""
    return (
        f"; none is at {names}: do shadow nodes run, does `checkmate run` serve, and does the switch pass "
        f"packets of shadow NICs to it{port}?"
    )


async def _status(
    jobs: Sequence[Job], timeout: float, progress: Status | LateLine
) -> tuple[list[SwitchStatus], list[ControlError]]:
    """Read all switches at once. Return the status of each that can be read, and the errors of the others."""
    network = Network(jobs)
    deadline = time.monotonic() + timeout
    latest: dict[str, SwitchStatus] = {}

    def show_progress(status: SwitchStatus) -> None:
        latest[status.switch] = status
        streams = [stream for switch_status in latest.values() for stream in switch_status.streams]
        ready = sum(stream.connected for stream in streams)
        progress.update(f"{ready:,} of {counted(len(streams), 'stream')} connected")

    answers = await asyncio.gather(
        *(_switch(network, switch, deadline, show_progress) for switch in network.switches.values())
    )
    statuses = [answer for answer in answers if isinstance(answer, SwitchStatus)]
    return statuses, [answer for answer in answers if isinstance(answer, ControlError)]


async def _switch(
    network: Network, switch: Switch, deadline: float, show_progress: Callable[[SwitchStatus], None]
) -> SwitchStatus | ControlError:
    """Return a switch's status once all its streams connect or the deadline passes, or its error."""
    while True:
        try:
            async with SwitchSession(switch, Codec.for_switch(switch)) as session:
                await session.check_pipeline()
                while True:
                    status = await read_status(session, network)
                    if time.monotonic() >= deadline or all(stream.connected for stream in status.streams):
                        return status
                    show_progress(status)
                    await asyncio.sleep(POLL_SECONDS)
        except (SwitchUnreachable, NoProgram) as error:  # `run` may still be starting
            if time.monotonic() >= deadline:
                return error
            await asyncio.sleep(POLL_SECONDS)
        except ControlError as error:
            return error


def switch_tables(status: SwitchStatus) -> list[FittedTable]:
    """Return a table of a switch's streams for each job."""
    jobs = sorted({stream.job for stream in status.streams} - set(status.not_installed))
    return [_job_table(status, job) for job in jobs]


def switch_lines(status: SwitchStatus) -> list[str]:
    """Return lines about jobs that are not installed on a switch, and its counters of tagged traffic."""
    absent = [f"job {job} is not installed on switch {status.switch}" for job in status.not_installed]
    unreplicated, losses = status.passed, status.losses
    line = (
        f"switch {status.switch}: copies lost: {losses['not_connected'].packets:,} not connected, "
        f"{losses['old_incarnation'].packets:,} of old incarnations; "
        f"marked but not replicated: {unreplicated['without_tag'].packets:,} without a tag, "
        f"{unreplicated['without_entry'].packets:,} without an entry; "
        f"plain ACKs dropped: {status.acks_dropped:,}"
    )
    refusals = [f"switch {status.switch}: {refusal}" for refusal in status.refused if refusal.packets]
    return [*absent, *refusals, line]


def _job_table(status: SwitchStatus, job: str) -> FittedTable:
    title = f"switch {status.switch} ({status.target}), job {job}"
    columns, numbers = (
        ("group", "side", "ch", "shard", "node", "NIC", "connected"),
        ("packets", "bytes", "lost"),
    )
    table = FittedTable(title, *columns, *numbers, numbers=numbers)
    for stream in sorted((s for s in status.streams if s.job == job), key=_order):
        table.add_row(
            stream.dp_group_name,
            SIDES[stream.side] + (", trees" if stream.in_trees else ""),
            str(stream.channel),
            f"{stream.shard}" + (f" #{stream.replication_id}" if stream.replication_id > 1 else ""),
            str(stream.shadow_node),
            stream.nic,
            _connected(stream),
            f"{stream.packets:,}",
            size(stream.bytes),
            Text(f"{stream.lost:,}", "red" if stream.lost else ""),
        )
    return table


def _connected(stream: StreamStatus) -> Text:
    if not stream.connected:
        return Text("no", "yellow")
    return Text.assemble(("yes", "green"), f" ({stream.incarnation})")


def _order(stream: StreamStatus) -> tuple[object, ...]:
    return (stream.job, stream.dp_group, stream.side, stream.channel, stream.shadow_id, stream.replication_id)
