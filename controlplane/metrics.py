"""A controller's switches and streams as metrics of Prometheus.

Streams are read from the switches when metrics are asked for, at most once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from controlplane.controller import SwitchController
from controlplane.errors import ControlError
from controlplane.guard import Refusal
from controlplane.serve import Fleet, status_now
from controlplane.status import SIDES, StreamStatus, SwitchStatus

READ_SECONDS: Final = 5.0
FRESH_SECONDS: Final = 1.0
_FAILURES: Final = ("WriteRefused", "Unsure", "SwitchUnreachable", "AnotherPrimary")
_OF_STREAM: Final = ("switch", "job", "dp_group", "side", "channel", "shadow_id", "node", "replication_id")


@dataclass(frozen=True, slots=True)
class SwitchSeen:
    """What a controller knows of a switch. `status`: as it was read; `None` if the switch is away."""

    name: str
    term: int | None
    """Of its election id, as long as it is primary."""
    status: SwitchStatus | None
    refused: Mapping[str, int]
    """Writes that failed, by error."""
    reconciled: int
    reconcile_seconds: float
    strays: int = 0
    """Packets that the guard has refused for an address at other ports than its own."""


class StrayPackets:
    """A switch's sum of the guard's counters of addresses, which outlives their entries.

    Entries go with their job. The sum would fall then, and rate() would take that for a restart.
    """

    def __init__(self) -> None:
        self.total = 0
        self._last: dict[str, int] = {}

    def take(self, refused: Iterable[Refusal]) -> int:
        """Add what was counted since the last call, and return the sum."""
        now = {one.address: one.packets for one in refused if one.port is None}
        for address, packets in now.items():
            before = self._last.get(address, 0)
            self.total += packets - before if packets >= before else packets  # a new entry counts from 0
        self._last = now
        return self.total


def families(seen: Sequence[SwitchSeen], *, standby: bool) -> Iterator[Metric]:
    """Yield the metrics `checkmate_controller_*`, `checkmate_switch_*` and `checkmate_stream_*`. Pure."""
    waits = GaugeMetricFamily("checkmate_controller_standby", "Whether another controller serves.")
    waits.add_metric((), int(standby))
    yield waits
    yield _gauge(
        "checkmate_controller_primary",
        "Whether this controller is the switch's primary.",
        ((one.name, int(one.term is not None)) for one in seen),
    )
    yield _gauge(
        "checkmate_controller_term",
        "Of this controller's election id; it grows with each change of the primary.",
        ((one.name, one.term) for one in seen if one.term is not None),
    )
    yield _gauge(
        "checkmate_switch_up",
        "Whether the switch answers.",
        ((one.name, int(one.status is not None)) for one in seen),
    )
    failed = CounterMetricFamily(
        "checkmate_switch_write_errors", "Writes that failed.", labels=("switch", "error")
    )
    took = SummaryMetricFamily(
        "checkmate_reconcile_duration_seconds", "Reconciliations after a connect.", labels=("switch",)
    )
    for one in seen:
        for error in _FAILURES:
            failed.add_metric((one.name, error), one.refused.get(error, 0))
        took.add_metric((one.name,), one.reconciled, one.reconcile_seconds)
    yield from (failed, took)
    yield from _of_streams([stream for one in seen if one.status for stream in one.status.streams])
    yield from _of_traffic([one.status for one in seen if one.status])
    yield from _of_guard(seen)


def _of_streams(streams: Sequence[StreamStatus]) -> Iterator[Metric]:
    connected = GaugeMetricFamily(
        "checkmate_stream_connected", "Whether the stream's entry is on the switch.", labels=_OF_STREAM
    )
    for stream in streams:
        connected.add_metric(_labels(stream), int(stream.connected))
    yield connected
    # A new entry counts from 0, so these fall to 0 whenever a stream connects, as rate() expects.
    for name, text, counted in (
        ("copied_packets", "Segments copied for the stream.", [stream.packets for stream in streams]),
        ("copied_bytes", "Bytes of frames copied for the stream.", [stream.bytes for stream in streams]),
        ("lost_packets", "Copies made while it was not connected.", [stream.lost for stream in streams]),
        ("lost_bytes", "Bytes of those copies.", [stream.lost_bytes for stream in streams]),
    ):
        family = CounterMetricFamily(f"checkmate_stream_{name}", text, labels=_OF_STREAM)
        for stream, count in zip(streams, counted, strict=True):
            family.add_metric(_labels(stream), count)
        yield family


def _of_traffic(switches: Sequence[SwitchStatus]) -> Iterator[Metric]:
    for name, text, counters in (
        ("passed", "Tagged segments that were not copied.", [one.passed for one in switches]),
        ("losses", "Copies without a connected stream.", [one.losses for one in switches]),
    ):
        family = CounterMetricFamily(f"checkmate_switch_{name}_packets", text, labels=("switch", "reason"))
        for switch, counter in zip(switches, counters, strict=True):
            for reason, count in counter.items():
                family.add_metric((switch.switch, reason), count.packets)
        yield family


def _of_guard(seen: Sequence[SwitchSeen]) -> Iterator[Metric]:
    """Yield what was refused at each host's port, and at all other ports together, which have no number."""
    family = CounterMetricFamily(
        "checkmate_switch_refused_packets", "Packets that the guard refused.", labels=("switch", "port")
    )
    for switch in seen:
        if switch.status is None:
            continue
        family.add_metric((switch.name, ""), switch.strays)
        for one in switch.status.refused:
            if one.port is not None:
                family.add_metric((switch.name, str(one.port)), one.packets)
    yield family


def _labels(stream: StreamStatus) -> tuple[str, ...]:
    return tuple(
        str(part)
        for part in (
            stream.switch,
            stream.job,
            stream.dp_group,
            SIDES[stream.side],
            stream.channel,
            stream.shadow_id,
            stream.shadow_node,
            stream.replication_id,
        )
    )


def _gauge(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    made = GaugeMetricFamily(name, text, labels=("switch",))
    for switch, value in values:
        made.add_metric((switch,), value)
    return made


class SwitchReading:
    """Reads the switches of whichever fleet serves now. Its methods are for other threads than the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.fleet: Fleet | None = None
        """Set and read by the loop; `None` while this controller stands by."""
        self.standby = False
        """Whether another controller serves."""
        self._seen: list[SwitchSeen] = []
        self._strays: dict[str, StrayPackets] = {}
        self._at = float("-inf")
        self._reading = asyncio.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        seen = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(3 * READ_SECONDS)
        return families(seen, standby=self.standby)

    def not_ready(self) -> str:
        """Return why streams cannot connect, or ""."""
        fleet = self.fleet
        if fleet is None:
            return "standing by" if self.standby else "connecting to the switches"
        away = sorted(name for name, one in list(fleet.controllers.items()) if one.session is None)
        return f"not connected: {', '.join(away)}" if away else ""

    async def _read(self) -> list[SwitchSeen]:
        async with self._reading:
            if self.fleet is None:
                return []
            if time.monotonic() - self._at > FRESH_SECONDS:
                controllers = list(self.fleet.controllers.values())
                self._seen = await asyncio.gather(*map(self._see, controllers))
                self._at = time.monotonic()
            return self._seen

    async def _see(self, controller: SwitchController) -> SwitchSeen:
        session, name = controller.session, controller.switch.name
        try:
            status = await asyncio.wait_for(status_now(controller), READ_SECONDS)
        except (ControlError, TimeoutError):
            status = None
        strays = self._strays.setdefault(name, StrayPackets())
        return SwitchSeen(
            name,
            session.term if session is not None else None,
            status,
            dict(controller.refused),
            controller.reconciled,
            controller.reconcile_seconds,
            strays.take(status.refused) if status is not None else strays.total,
        )
