"""A node's live view, as text and as JSON lines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from checkmate.base.systemd import notify, watchdog_seconds
from checkmate.base.wording import JSON_VERSION, counted, size
from checkmate.nodes.standing import lag, refusal_words
from checkmate.output.tables import FittedTable
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.calls.begin import node_status
from checkmate.shadow.node import Node

SECONDS = 1.0


class StatusWatch:
    """Repeated reading of a node's status, with rates."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._at = time.monotonic()
        self._bytes: dict[str, int] = {}

    def see(self) -> tuple[pb.NodeStatus, dict[str, float]]:
        """Return the current status, and each NIC's bytes per second since the previous one."""
        status = node_status(self._node, self._node.job.job)
        now = time.monotonic()
        seconds = max(now - self._at, 1e-6)
        rates = {nic.ip: (nic.bytes - self._bytes.get(nic.ip, nic.bytes)) / seconds for nic in status.nics}
        self._at, self._bytes = now, {nic.ip: nic.bytes for nic in status.nics}
        return status, rates


def follow(node: Node, stopped: threading.Event, console: Console | None, *, as_json: bool) -> None:
    """Show a node until `stopped`: a live view on `console`, a line of JSON each second, or nothing.

    A service manager's watchdog is told each second that the node's lock can be had.
    """
    watched = watchdog_seconds() is not None
    watch = StatusWatch(node)
    view = Live(Group(), console=console, refresh_per_second=4)
    with view if console else nullcontext():
        while not stopped.wait(SECONDS):  # returns regularly, so that Python can run signal handlers
            if watched:
                with node.state_changed:
                    notify("WATCHDOG=1")
            if console:
                view.update(picture(*watch.see()))
            elif as_json:
                print(json.dumps(data(*watch.see())), flush=True)


def time_now() -> str:
    """Return the time of a line: UTC, ISO 8601, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def data(status: pb.NodeStatus, rates: Mapping[str, float]) -> dict[str, object]:
    """Return what `--json` prints: the time, the fields of the status, and rates."""
    fields = plain(status)
    for hold, of in zip(fields["holds"], status.holds, strict=True):
        hold["lag"] = lag(of)
    rounded = {ip: round(rate) for ip, rate in rates.items()}
    return {"version": JSON_VERSION, "time": time_now(), **fields, "bytes_per_second": rounded}


def plain(message: Message) -> dict[str, Any]:
    """Return a message as data, bytes as hex. Unlike protobuf's JSON, 64-bit numbers stay numbers.

    A field that is `optional` and not set is `None`.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.containing_oneof and not message.HasField(field.name):
            value = None  # `optional`
        elif field.message_type and field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif field.message_type:
            value = [plain(part) for part in value] if field.is_repeated else plain(value)
        elif field.is_repeated:
            value = list(value)
        elif isinstance(value, bytes):
            value = value.hex()
        fields[field.name] = value
    return fields


def picture(status: pb.NodeStatus, rates: Mapping[str, float]) -> Group:
    """Return a table of holds, if there are any yet, and lines about the node."""
    title = f"shadow node {status.node}, job {status.job}"
    numbers = ("iteration", "behind", "streams", "received")
    table = FittedTable(title, "group", "shard", "state", *numbers, numbers=numbers)
    for hold in status.holds:
        table.add_row(
            str(hold.shard.group),
            str(hold.shard.shard),
            state_of(hold, status.fenced),
            str(hold.stepped) if hold.seeded and hold.stepped >= 0 else "-",
            _behind(hold),
            f"{hold.connected} of {hold.streams}",
            size(hold.bytes),
        )
    nics = ", ".join(f"{ip} {size(rate)}/s" for ip, rate in rates.items())
    times = f"pull {status.pull_seconds * 1000:.3g} ms; step {status.step_seconds * 1000:.3g} ms"
    troubles = [hold.trouble for hold in status.holds if hold.trouble] + list(status.trouble)
    troubles += [
        f"shadow node {peer.node} is {counted(peer.iterations, 'iteration')} behind the last commit"
        for peer in status.behind
    ]
    if status.HasField("refusal"):
        troubles.insert(0, f"training was refused {refusal_words(status.refusal)}")
    lines = [Text(f"{nics}; {times}; memory {size(status.memory_bytes)}")]
    # Not as markup, because names of parameters may look like it.
    body = table if status.holds else f"{title}: waiting for training"
    return Group(body, *lines, *(Text(trouble, "yellow") for trouble in troubles))


def state_of(hold: pb.HoldStatus, fenced: bool) -> Text:
    """Return one word for the state of a hold."""
    if hold.doubtful:
        return Text("doubtful", "red")
    if fenced:
        return Text("fenced", "yellow")
    return Text("live", "green") if hold.live else Text("joining", "yellow")


def _behind(hold: pb.HoldStatus) -> Text:
    behind = lag(hold)
    return Text(str(behind), "yellow" if behind > 2 else "")
