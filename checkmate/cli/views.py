"""Tables of streams and switches, for `run`'s live view and `status`."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from checkmate.wording import size
from controlplane.status import StreamStatus, SwitchStatus

SIDES = ("first", "last")


def switch_tables(status: SwitchStatus) -> Group:
    """Return a table of a switch's streams for each job, and a line of counters of tagged traffic."""
    jobs = sorted({stream.job for stream in status.streams} - set(status.not_installed))
    tables = [_job_table(status, job) for job in jobs]
    absent = [f"job {job} is not installed on switch {status.switch}" for job in status.not_installed]
    passed, losses = status.passed, status.losses
    line = (
        f"copies lost: {losses['not_connected'].packets:,} not connected, "
        f"{losses['old_incarnation'].packets:,} of old incarnations; "
        f"marked but not replicated: {passed['without_tag'].packets:,} without a tag, "
        f"{passed['without_entry'].packets:,} without an entry; plain ACKs dropped: {status.acks_dropped:,}"
    )
    return Group(*tables, *absent, line)


def _job_table(status: SwitchStatus, job: str) -> Table:
    title = f"switch {status.switch} ({status.target}), job {job}"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    for column in ("group", "side", "ch", "shard", "node", "NIC", "connected"):
        table.add_column(column, no_wrap=True)
    for column in ("packets", "bytes", "lost"):
        table.add_column(column, justify="right", no_wrap=True)
    for stream in sorted((s for s in status.streams if s.job == job), key=_order):
        table.add_row(
            str(stream.dp_group),
            SIDES[stream.side],
            str(stream.channel),
            f"{stream.shadow_id}" + (f" #{stream.replication_id}" if stream.replication_id > 1 else ""),
            str(stream.shadow_node),
            stream.nic,
            f"[green]yes[/green] ({stream.incarnation})" if stream.connected else "[yellow]no[/yellow]",
            str(stream.packets),
            size(stream.bytes),
            f"[red]{stream.lost}[/red]" if stream.lost else "0",
        )
    return table


def _order(stream: StreamStatus) -> tuple[object, ...]:
    return (stream.job, stream.dp_group, stream.side, stream.channel, stream.shadow_id, stream.replication_id)
