"""The switch's statistics as metrics of Prometheus. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

_PORT_METRICS: Final = {
    "received_bytes": ("rx_bytes", "Bytes received."),
    "received_packets": ("rx_packets", "Frames received."),
    "received_dropped_packets": ("rx_dropped", "Received frames that were dropped before the switch."),
    "sent_bytes": ("tx_bytes", "Bytes sent."),
    "sent_packets": ("tx_packets", "Frames sent."),
    "refused_packets": ("refused", "Segments that a full port refused; TCP repeats them."),
    "withheld_packets": ("withheld", "Segments held back because a copy was refused; TCP repeats them."),
    "disconnected_packets": ("disconnected", "Copies lost because the port was not connected."),
    "unsendable_packets": ("unsendable", "Copies lost because their checksum could not be completed."),
    "oversized_packets": ("oversized", "Frames too large to enter the switch."),
}
_SWITCH_METRICS: Final = {
    "unknown_port_packets": ("unknown_port", "Copies to ports that do not exist."),
    "packet_in_dropped_packets": ("packet_in_dropped", "Frames that a controller did not read in time."),
    "packet_in_unheard_packets": ("packet_in_unheard", "Frames for the controller while there was none."),
}


def families(statistics: Mapping[str, Any], device_id: int, primaries: int) -> Iterator[Metric]:
    """Yield what `process.statistics` returned as metrics `checkmate_softswitch_*`."""
    device = str(device_id)
    for name, (key, text) in _PORT_METRICS.items():
        port = CounterMetricFamily(
            f"checkmate_softswitch_port_{name}", text, labels=("device", "port", "interface")
        )
        for number, counts in statistics["ports"].items():
            port.add_metric((device, number, counts["interface"]), counts[key])
        yield port
    for name, (key, text) in _SWITCH_METRICS.items():
        whole = CounterMetricFamily(f"checkmate_softswitch_{name}", text, labels=("device",))
        whole.add_metric((device,), statistics[key])
        yield whole
    has = GaugeMetricFamily(
        "checkmate_softswitch_primaries", "Controllers that are primary.", labels=("device",)
    )
    has.add_metric((device,), primaries)
    yield has
