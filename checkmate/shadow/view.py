"""A node's live view, and the same as JSON lines."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.calls.status import node_status
from checkmate.shadow.node import Node

SECONDS = 1.0


@dataclass(frozen=True)
class Seen:
    """A status, and each NIC's bytes a second since the one before."""

    status: pb.NodeStatus
    rates: dict[str, float]


class Watch:
    """Reads a node's status again and again, and works out rates."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._at = time.monotonic()
        self._bytes: dict[str, int] = {}

    def see(self) -> Seen:
        """The node now."""
        status = node_status(self._node, self._node.job.job)
        now = time.monotonic()
        passed = max(now - self._at, 1e-6)
        rates = {nic.ip: (nic.bytes - self._bytes.get(nic.ip, nic.bytes)) / passed for nic in status.nics}
        self._at, self._bytes = now, {nic.ip: nic.bytes for nic in status.nics}
        return Seen(status, rates)


def follow(node: Node, stopped: threading.Event, console: Console, *, live: bool, as_json: bool) -> None:
    """Show a node until `stopped`: a live view, a line of JSON each second, or nothing."""
    watch = Watch(node)
    if live:
        with Live(Group(), console=console, refresh_per_second=4) as shown:
            while not stopped.wait(SECONDS):
                shown.update(picture(watch.see()))
    elif as_json:
        while not stopped.wait(SECONDS):
            print(json.dumps(data(watch.see())), flush=True)
    else:
        while not stopped.wait(SECONDS):  # a signal that another thread took is handled between two waits
            pass


def data(seen: Seen) -> dict[str, object]:
    """What `--json` prints: the status as `shadow.proto` names its fields, and rates."""
    said = plain(seen.status)
    for hold, of in zip(said["holds"], seen.status.holds, strict=True):
        hold["lag"] = lag(of)
    return {**said, "bytes_per_second": {ip: round(rate) for ip, rate in seen.rates.items()}}


def plain(message: Message) -> dict[str, Any]:
    """A message as data: numbers as numbers (protobuf's JSON has 64 bits as text), bytes as hex."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type:
            value = [plain(one) for one in value] if field.is_repeated else plain(value)
        elif field.is_repeated:
            value = list(value)
        elif isinstance(value, bytes):
            value = value.hex()
        found[field.name] = value
    return found


def lag(hold: pb.HoldStatus) -> int:
    """Iterations that trainers are ahead: the newest that is coming, less the last stepped."""
    return max(0, hold.receiving - hold.stepped) if hold.seeded else 0


def picture(seen: Seen) -> Group:
    """A table of holds, and lines of the rest."""
    status = seen.status
    table = Table(title=f"shadow node {status.node}, job {status.job}", title_justify="left")
    for column in ("group", "shard", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("iteration", "behind", "streams", "received"):
        table.add_column(column, justify="right", no_wrap=True)
    for hold in status.holds:
        table.add_row(
            str(hold.shard.group),
            str(hold.shard.shard),
            state_of(hold, status.fenced),
            str(hold.stepped) if hold.seeded else "-",
            _behind(hold),
            f"{hold.connected} of {hold.streams}",
            size(hold.bytes),
        )
    nics = ", ".join(f"{ip} {size(rate)}/s" for ip, rate in seen.rates.items())
    times = f"pull {status.pull_seconds * 1000:.3g} ms; step {status.step_seconds * 1000:.3g} ms"
    troubles = [hold.trouble for hold in status.holds if hold.trouble] + list(status.trouble)
    troubles += [
        f"shadow node {other.node} is {other.iterations} iterations behind what is committed"
        for other in status.behind
    ]
    lines = [Text(f"{nics}; {times}; memory {size(status.memory_bytes)}")]
    # Not as markup: names of parameters may look like it.
    return Group(table, *lines, *(Text(trouble, "yellow") for trouble in troubles))


def state_of(hold: pb.HoldStatus, fenced: bool) -> str:
    """One word for what a hold is doing."""
    if hold.doubtful:
        return "[red]doubtful[/red]"
    if fenced:
        return "[yellow]fenced[/yellow]"
    if hold.live:
        return "[green]live[/green]"
    return "[yellow]joining[/yellow]"


def _behind(hold: pb.HoldStatus) -> str:
    behind = lag(hold)
    return f"[yellow]{behind}[/yellow]" if behind > 2 else str(behind)


def size(count: float) -> str:
    """Bytes, in decimal units: `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
