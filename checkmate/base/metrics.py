"""An HTTP server for Prometheus (`/metrics`) and service managers (`/healthz`, `/readyz`).

What is served is read when it is asked for, so a process whose metrics nobody scrapes does nothing for them.
Names follow prometheus.io/docs/practices/naming. Strangers who reach the address can read the metrics, and
keep others from reading them. The threads, the time of a request, the requests of a host and how often
anything is read are bounded.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from checkmate.base.rates import RateLimits

T = TypeVar("T")

_REQUESTS_MAX: Final = 8
"""Requests at a time; further connections are closed."""
_REQUEST_SECONDS: Final = 5.0
"""Time for a whole request, after which its connection is closed."""
_FRESH_SECONDS: Final = 1.0
"""Time for which an answer is given again, so that nobody can keep the process busy with reading."""
_PER_SECOND: Final = 50
"""Requests of one host, on average. Further connections are closed."""
_BURST: Final = 200
"""Requests that a host may make at once."""
_HOSTS_MAX: Final = 256
"""Hosts of which the requests are counted. Others wait until one has been quiet."""

LOG = logging.getLogger("checkmate")


class MetricsError(Exception):
    """The address cannot be used; the message has the reason."""

    exit_code = 2


class MetricsServer:
    """Serves the metrics of a process, as a context manager."""

    def __init__(
        self,
        address: str,
        collect: Callable[[], Iterable[Metric]],
        not_ready: Callable[[], str],
    ) -> None:
        """Listen at once, so that a wrong address is told before anything starts. Start no thread.

        Args:
            address: HOST:PORT.
            collect: Returns the metrics as they are now; called in a thread of its own.
            not_ready: Returns why the process cannot do its work yet, or "".

        Raises:
            MetricsError: The address is invalid or in use.
        """
        registry = CollectorRegistry()
        registry.register(_Collected(collect))
        ProcessCollector(registry=registry)
        parts = {
            "registry": registry,
            "texts": _Fresh[bytes](),
            "not_ready": staticmethod(not_ready),
            "reasons": _Fresh[str](),
        }
        handler = type("Handler", (_Handler,), parts)
        try:
            self._server = _Server(*host_and_port(address), handler)
        except OSError as error:
            strange = error.errno == errno.EADDRNOTAVAIL
            why = "not an address of this machine" if strange else error.strerror or error
            raise MetricsError(f"--metrics {address}: {why}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT. Raise `MetricsError` if it is not that."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise MetricsError(f"--metrics {address}: must be an address such as 127.0.0.1:9460")
    return host.strip("[]"), int(port)


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        build = {"version": version("checkmate-training")}
        yield InfoMetricFamily("checkmate_build", "Checkmate's version.", build)
        yield from self._collect()


class _Fresh(Generic[T]):
    """Values by name, each read at most once in `_FRESH_SECONDS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, tuple[float, T]] = {}

    def get(self, name: str, read: Callable[[], T]) -> T:
        """Return the value of a name, from `read` if it is old or not there."""
        with self._lock:
            if name not in self._values or time.monotonic() - self._values[name][0] > _FRESH_SECONDS:
                value = read()
                self._values[name] = time.monotonic(), value
            return self._values[name][1]


class _Server(ThreadingTCPServer):  # http.server's asks the DNS for its own name
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, handler: Any) -> None:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self._requests = threading.BoundedSemaphore(_REQUESTS_MAX)
        self._rates = RateLimits[str](_PER_SECOND, _BURST, _HOSTS_MAX)
        super().__init__((str(where[0]), int(where[1])), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless there are too many, or its host has had enough."""
        if self._rates.admits(client_address[0], time.monotonic()) and self._requests.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and end it after a time."""
        deadline = threading.Timer(_REQUEST_SECONDS, _break, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._requests.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong, without a traceback: mostly, the client has gone."""
        LOG.debug("a request for metrics from %s failed", client_address[0], exc_info=True)


def _break(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    texts: _Fresh[bytes]
    not_ready: Callable[[], str]
    reasons: _Fresh[str]
    server_version = "checkmate"
    sys_version = ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer a request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/healthz":
            self._answer(HTTPStatus.OK, b"ok\n")
        elif path == "/readyz":
            reason = self.reasons.get(path, self.not_ready)
            status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
            self._answer(status, f"{reason or 'ready'}\n".encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /healthz or /readyz\n")

    def _metrics(self) -> None:
        try:
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            text = self.texts.get(kind, lambda: encode(self.registry))
        except Exception as error:  # noqa: BLE001 - it must not end what is measured
            LOG.error("metrics could not be read: %r", error)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"metrics could not be read; see the log\n")
            return
        self._answer(HTTPStatus.OK, text, kind)

    def _answer(self, status: HTTPStatus, text: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing: scrapes come every few seconds."""
