"""The server of metrics: what it answers, and what strangers can do to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from checkmate.base import metrics
from checkmate.base.metrics import MetricsError, MetricsServer


def sample_metrics() -> Iterator[Metric]:
    yield GaugeMetricFamily("checkmate_thing", "A thing.", 7.0)


def get(server: MetricsServer, path: str, **headers: str) -> str:
    address = f"http://127.0.0.1:{server.port}{path}"
    with urlopen(Request(address, headers=headers), timeout=5) as answer:
        return str(answer.read().decode())


def test_many_scrapes_read_once() -> None:
    reads = 0

    def count() -> Iterator[Metric]:
        nonlocal reads
        reads += 1
        yield from sample_metrics()

    with MetricsServer("127.0.0.1:0", count, lambda: "") as server:
        assert len({get(server, "/metrics") for _ in range(20)}) == 1
    assert reads == 1


def test_prometheus_reads_the_metrics_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    value = 1.0

    def now() -> Iterator[Metric]:
        yield GaugeMetricFamily("checkmate_thing", "A thing.", value)

    with MetricsServer("127.0.0.1:0", now, lambda: "") as server:
        for value in (1.0, 2.0):
            families = {
                family.name: family for family in text_string_to_metric_families(get(server, "/metrics"))
            }
            assert families["checkmate_thing"].samples[0].value == value
            assert families["checkmate_build_info"].samples[0].labels["version"]
            assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20
            monkeypatch.setattr(metrics, "_FRESH_SECONDS", 0.0)
        assert "# EOF" in get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")


def test_it_says_whether_the_process_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_FRESH_SECONDS", 0.0)
    reason = "no program is loaded"
    with MetricsServer("127.0.0.1:0", sample_metrics, lambda: reason) as server:
        assert get(server, "/healthz") == "ok\n"
        with pytest.raises(HTTPError) as unready:
            get(server, "/readyz")
        assert (unready.value.code, unready.value.read()) == (503, b"no program is loaded\n")
        reason = ""
        assert get(server, "/readyz") == "ready\n"
        with pytest.raises(HTTPError, match="404"):
            get(server, "/")


def test_many_who_ask_whether_it_is_ready_have_it_read_once() -> None:
    """A shadow node makes a whole status for it."""
    reads = 0

    def reason() -> str:
        nonlocal reads
        reads += 1
        return ""

    with MetricsServer("127.0.0.1:0", sample_metrics, reason) as server:
        assert {get(server, "/readyz") for _ in range(20)} == {"ready\n"}
    assert reads == 1


def test_a_host_that_asks_all_the_time_is_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand requests a second took most of a core."""
    monkeypatch.setattr(metrics, "_PER_SECOND", 0.001)
    with MetricsServer("127.0.0.1:0", sample_metrics, lambda: "") as server:
        for _ in range(metrics._BURST):
            assert get(server, "/healthz") == "ok\n"
        with pytest.raises(OSError, match=r"closed|reset"):
            get(server, "/healthz")
        with socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0)) as calm:
            calm.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert calm.makefile().read().endswith("ok\n")


def test_a_flood_from_many_addresses_is_counted_in_bounded_memory() -> None:
    with MetricsServer("127.0.0.1:0", sample_metrics, lambda: "") as server:
        rates = server._server._rates
        assert sum(rates.admits(str(host), 100.0) for host in range(10_000)) == metrics._HOSTS_MAX


def test_a_failure_to_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Iterator[Metric]:
        raise RuntimeError("the switch has gone")

    with MetricsServer("127.0.0.1:0", fail, lambda: "") as server:
        with pytest.raises(HTTPError, match="500"):
            get(server, "/metrics")
        assert "metrics could not be read: RuntimeError('the switch has gone')" in caplog.text
        assert get(server, "/healthz") == "ok\n"


def closed(sock: socket.socket) -> bool:
    """Return whether the other end closes a connection without an answer."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_keep_it_busy_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_SECONDS", 0.5)
    with MetricsServer("127.0.0.1:0", sample_metrics, lambda: "") as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        for connection in idle:
            connection.settimeout(3)
        began = time.monotonic()
        for connection in idle[:8]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        time.sleep(0.3)
        for connection in idle[:8]:
            with suppress(OSError):
                connection.sendall(b"a")  # a byte now and then does not help
        assert all(map(closed, idle))
        assert time.monotonic() - began < 3
        assert "checkmate_thing" in get(server, "/metrics")
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("address", ["9460", "127.0.0.1:", "127.0.0.1:99999", "host:port", ":9460"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(MetricsError, match=f"--metrics {address}: must be an address such as"):
        MetricsServer(address, sample_metrics, lambda: "")


def test_an_address_in_use_is_refused() -> None:
    with (
        MetricsServer("127.0.0.1:0", sample_metrics, lambda: "") as server,
        pytest.raises(MetricsError, match="Address already in use"),
    ):
        MetricsServer(f"127.0.0.1:{server.port}", sample_metrics, lambda: "")
    with pytest.raises(MetricsError, match="--metrics 192.0.2.1:9460: not an address"):
        MetricsServer("192.0.2.1:9460", sample_metrics, lambda: "")
