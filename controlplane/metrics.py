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
_STREAM_LABELS: Final = (
    "switch",
    "job",
    "dp_group",
    "side",
    "channel",
    "shadow_id",
    "node",
    "replication_id",
)


@dataclass(frozen=True, slots=True)
class SwitchSample:
    """A controller's data on a switch at one time. `status` is `None` if the switch is away."""

    name: str
    term: int | None
    """The term of its election id, as long as it is primary."""
    status: SwitchStatus | None
    write_errors: Mapping[str, int]
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

    def take(self, refusals: Iterable[Refusal]) -> int:
        """Add what was counted since the last call, and return the sum."""
        now = {refusal.address: refusal.packets for refusal in refusals if refusal.port is None}
        for address, packets in now.items():
            before = self._last.get(address, 0)
            self.total += packets - before if packets >= before else packets  # a new entry counts from 0
        self._last = now
        return self.total


def families(samples: Sequence[SwitchSample], *, standby: bool) -> Iterator[Metric]:
    """Yield the metrics `checkmate_controller_*`, `checkmate_switch_*` and `checkmate_stream_*`. Pure."""
    waits = GaugeMetricFamily("checkmate_controller_standby", "Whether another controller serves.")
    waits.add_metric((), int(standby))
    yield waits
    yield _gauge(
        "checkmate_controller_primary",
        "Whether this controller is the switch's primary.",
        ((sample.name, int(sample.term is not None)) for sample in samples),
    )
    yield _gauge(
        "checkmate_controller_term",
        "Of this controller's election id; it grows with each change of the primary.",
        ((sample.name, sample.term) for sample in samples if sample.term is not None),
    )
    yield _gauge(
        "checkmate_switch_up",
        "Whether the switch answers.",
        ((sample.name, int(sample.status is not None)) for sample in samples),
    )
    failed = CounterMetricFamily(
        "checkmate_switch_write_errors", "Writes that failed.", labels=("switch", "error")
    )
    took = SummaryMetricFamily(
        "checkmate_reconcile_duration_seconds", "Reconciliations after a connect.", labels=("switch",)
    )
    for sample in samples:
        for error in _FAILURES:
            failed.add_metric((sample.name, error), sample.write_errors.get(error, 0))
        took.add_metric((sample.name,), sample.reconciled, sample.reconcile_seconds)
    yield from (failed, took)
    yield from _stream_metrics(
        [stream for sample in samples if sample.status for stream in sample.status.streams]
    )
    yield from _traffic_metrics([sample.status for sample in samples if sample.status])
    yield from _guard_metrics(samples)


def _stream_metrics(streams: Sequence[StreamStatus]) -> Iterator[Metric]:
    connected = GaugeMetricFamily(
        "checkmate_stream_connected", "Whether the stream's entry is on the switch.", labels=_STREAM_LABELS
    )
    for stream in streams:
        connected.add_metric(_labels(stream), int(stream.connected))
    yield connected
    # A new entry counts from 0, so these fall to 0 whenever a stream connects, as rate() expects.
    for name, text, counts in (
        ("copied_packets", "Segments copied for the stream.", [stream.packets for stream in streams]),
        ("copied_bytes", "Bytes of frames copied for the stream.", [stream.bytes for stream in streams]),
        ("lost_packets", "Copies made while it was not connected.", [stream.lost for stream in streams]),
        ("lost_bytes", "Bytes of those copies.", [stream.lost_bytes for stream in streams]),
    ):
        family = CounterMetricFamily(f"checkmate_stream_{name}", text, labels=_STREAM_LABELS)
        for stream, count in zip(streams, counts, strict=True):
            family.add_metric(_labels(stream), count)
        yield family


def _traffic_metrics(switches: Sequence[SwitchStatus]) -> Iterator[Metric]:
    for name, text, counters in (
        ("passed", "Tagged segments that were not copied.", [status.passed for status in switches]),
        ("losses", "Copies without a connected stream.", [status.losses for status in switches]),
    ):
        family = CounterMetricFamily(f"checkmate_switch_{name}_packets", text, labels=("switch", "reason"))
        for switch, counter in zip(switches, counters, strict=True):
            for reason, count in counter.items():
                family.add_metric((switch.switch, reason), count.packets)
        yield family


def _guard_metrics(samples: Sequence[SwitchSample]) -> Iterator[Metric]:
    """Yield what was refused at each host's port, and at all other ports together, which have no number."""
    family = CounterMetricFamily(
        "checkmate_switch_refused_packets", "Packets that the guard refused.", labels=("switch", "port")
    )
    for sample in samples:
        if sample.status is None:
            continue
        family.add_metric((sample.name, ""), sample.strays)
        for refusal in sample.status.refused:
            if refusal.port is not None:
                family.add_metric((sample.name, str(refusal.port)), refusal.packets)
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
    gauge = GaugeMetricFamily(name, text, labels=("switch",))
    for switch, value in values:
        gauge.add_metric((switch,), value)
    return gauge


class SwitchReading:
    """Reads the switches of whichever fleet serves now. Its methods are for other threads than the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.fleet: Fleet | None = None
        """Set and read by the loop; `None` while this controller stands by."""
        self.standby = False
        """Another controller serves."""
        self._samples: list[SwitchSample] = []
        self._strays: dict[str, StrayPackets] = {}
        self._at = float("-inf")
        self._reading = asyncio.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        samples = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(3 * READ_SECONDS)
        return families(samples, standby=self.standby)

    def not_ready(self) -> str:
        """Return why streams cannot connect, or ""."""
        fleet = self.fleet
        if fleet is None:
            return "standing by" if self.standby else "connecting to the switches"
        away = sorted(
            name for name, controller in list(fleet.controllers.items()) if controller.session is None
        )
        return f"not connected: {', '.join(away)}" if away else ""

    async def _read(self) -> list[SwitchSample]:
        async with self._reading:
            if self.fleet is None:
                return []
            if time.monotonic() - self._at > FRESH_SECONDS:
                controllers = list(self.fleet.controllers.values())
                self._samples = await asyncio.gather(*map(self._sample, controllers))
                self._at = time.monotonic()
            return self._samples

    async def _sample(self, controller: SwitchController) -> SwitchSample:
        session, name = controller.session, controller.switch.name
        try:
            status = await asyncio.wait_for(status_now(controller), READ_SECONDS)
        except (ControlError, TimeoutError):
            status = None
        strays = self._strays.setdefault(name, StrayPackets())
        return SwitchSample(
            name,
            session.term if session is not None else None,
            status,
            dict(controller.write_errors),
            controller.reconciled,
            controller.reconcile_seconds,
            strays.take(status.refused) if status is not None else strays.total,
        )
