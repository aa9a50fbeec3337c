"""A job's shadow nodes as gRPC stubs; one call to many of them at once, and why a node gave no answer."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Final, TypeVar

import grpc

from checkmate.job.schema import Job
from checkmate.rpc.channels import client_context, open_channel
from checkmate.rpc.shadow_pb2_grpc import ShadowStub

Q = TypeVar("Q")
R = TypeVar("R")

ANSWER_SECONDS: Final = 5.0
"""A node that takes longer for a short answer is taken to be away."""

UNREACHABLE: Final = "can't be reached"
"""So begins the reason of a node whose address refuses connections, or that no way leads to."""

_REFUSALS: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
"""With these a shadow node refuses a call, in words of its own."""
_PLAIN: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "gave no answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "another service than a shadow node's is there",
}
_ROOT: Final = re.compile(
    r"(?:ipv[46]|unix):\S+: (?:Failed to connect to remote host: )?(?:[a-z_]+: )?(?P<why>.+?)(?: \(\d+\))?$"
)
"""In gRPC's `... UNKNOWN: ipv4:10.0.0.1:7000: Failed to connect to remote host: connect: why (111)`."""


class Stubs:
    """A job's shadow nodes as gRPC stubs, each with one channel. Context manager."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._lock = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}
        self._closed = False

    def __enter__(self) -> Stubs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to(self, node: int) -> ShadowStub:
        """Return the stub of a node; it connects at the first call. `TlsError` for a file of the job's.

        `ValueError` once it is closed, as gRPC has it for calls.
        """
        with self._lock:
            if node not in self._channels:
                if self._closed:
                    raise ValueError("the stubs are closed")
                self._channels[node] = open_channel(self.job, node)
            return ShadowStub(self._channels[node])

    def ask(
        self,
        nodes: Iterable[int],
        call: Callable[[ShadowStub], grpc.UnaryUnaryMultiCallable[Q, R]],
        request: Q,
        timeout: float = ANSWER_SECONDS,
    ) -> dict[int, R | str]:
        """Call nodes, all at once; return each one's answer, or why there is none. `timeout`: seconds."""
        return self.ask_each(dict.fromkeys(nodes, request), call, timeout)

    def ask_each(
        self,
        requests: Mapping[int, Q],
        call: Callable[[ShadowStub], grpc.UnaryUnaryMultiCallable[Q, R]],
        timeout: float = ANSWER_SECONDS,
    ) -> dict[int, R | str]:
        """The same with a request of its own for each node."""
        calls = {node: call(self.to(node)).future(one, timeout=timeout) for node, one in requests.items()}
        found: dict[int, R | str] = {}
        for node, answer in calls.items():
            try:
                found[node] = answer.result()
            except grpc.RpcError as error:
                found[node] = reason(error)
        return found

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """What step records are sent with, if the job has TLS. `TlsError` for its files."""
        return None if self.job.mgmt_tls is None else client_context(self.job.mgmt_tls)

    def close(self) -> None:
        """Close all channels, for good."""
        with self._lock:
            self._closed = True
            for channel in self._channels.values():
                channel.close()


def reason(error: Exception) -> str:
    """Return what went wrong with a node or with what it sent, in one line that follows the node's name."""
    if not isinstance(error, grpc.Call):
        return str(error) or type(error).__name__
    code, detail = error.code(), str(error.details() or "").partition("\n")[0]
    if code in _REFUSALS and detail:
        return detail
    if code == grpc.StatusCode.UNAVAILABLE:
        return f"{UNREACHABLE}{unreached(detail)}"
    return _PLAIN.get(code) or f"{code.name}{detail and ': '}{detail}"


def unreached(detail: str) -> str:
    """Return, of what gRPC says of a connection, only why, if that is found: ` (Connection refused)`."""
    found = _ROOT.search(detail)
    why = found["why"] if found else detail
    return f" ({why})" if why else ""
