"""A job's shadow nodes as gRPC stubs: parallel calls, and the wording of failures."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from checkmate.base.wording import shortened
from checkmate.job.schema import Job
from checkmate.keys.contexts import client_context
from checkmate.keys.folder import RoleKeys
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import SUPERSEDED, open_channel
from checkmate.rpc.protocol import PARTS_MAX, PROTOCOL, bounded, mismatch
from checkmate.rpc.shadow_pb2_grpc import ShadowStub

Q = TypeVar("Q")
R = TypeVar("R")

ANSWER_SECONDS: Final = 5.0
"""A node that takes longer for a short answer is considered away."""

UNREACHABLE: Final = "can't be reached"
"""The beginning of the reason if a node's address refuses connections or has no route."""

_REFUSALS: Final = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    SUPERSEDED,
)
"""A shadow node's own refusals, with a message."""
_PLAIN: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "did not answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "runs a service other than a shadow node's",
}
_ROOT: Final = re.compile(
    r"(?:ipv[46]|unix):\S+: (?:Failed to connect to remote host: )?(?:[a-z_]+: )?(?P<why>.+?)(?: \(\d+\))?$"
)
"""Matches gRPC's `... UNKNOWN: ipv4:10.0.0.1:7000: Failed to connect to remote host: connect: why (111)`."""
_NAME: Final = re.compile(r"address lookup failed for \S+: (?P<why>[^\[\]]+)\]")
"""Matches gRPC's `errors resolving cpu0:7000: [field:... address lookup failed for cpu0:7000: why]`."""


class Stubs(AbstractContextManager["Stubs"]):
    """A job's shadow nodes as gRPC stubs, with one channel per node. It is a context manager."""

    def __init__(self, job: Job, keys: RoleKeys | None) -> None:
        """Create it, without connecting. `keys`: those of this process; `None` for no TLS."""
        self.job = job
        self.keys = keys
        self._lock = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}
        self._closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def to(self, node: int) -> ShadowStub:
        """Return the stub of a node. It connects at the first call.

        Raises `ValueError` if the stubs are closed (gRPC raises the same for calls).
        """
        with self._lock:
            if node not in self._channels:
                if self._closed:
                    raise ValueError("the stubs are closed")
                self._channels[node] = open_channel(self.job, node, self.keys)
            return ShadowStub(self._channels[node])

    def ask(
        self,
        nodes: Iterable[int],
        call: Callable[[ShadowStub], grpc.UnaryUnaryMultiCallable[Q, R]],
        request: Q,
        timeout: float = ANSWER_SECONDS,
    ) -> dict[int, R | str]:
        """Call nodes in parallel. Return each one's answer, or why there is none. `timeout`: in seconds."""
        return self.ask_each(dict.fromkeys(nodes, request), call, timeout)

    def ask_each(
        self,
        requests: Mapping[int, Q],
        call: Callable[[ShadowStub], grpc.UnaryUnaryMultiCallable[Q, R]],
        timeout: float = ANSWER_SECONDS,
    ) -> dict[int, R | str]:
        """Call nodes in parallel like `ask`, each with its own request."""
        calls = {
            node: call(self.to(node)).future(request, timeout=timeout) for node, request in requests.items()
        }
        answers: dict[int, R | str] = {}
        for node, answer in calls.items():
            try:
                answers[node] = check_size(answer.result())
            except grpc.RpcError as error:
                answers[node] = reason(error)
        return answers

    def statuses(
        self, nodes: Iterable[int] | None = None, timeout: float = ANSWER_SECONDS
    ) -> dict[int, pb.NodeStatus | str]:
        """Ask nodes, by default all of the job, for their status. Return their answers like `ask`."""
        request = pb.StatusRequest(job=self.job.job, protocol=PROTOCOL)
        node_ids = [node.id for node in self.job.shadow_nodes] if nodes is None else nodes
        return self.ask(node_ids, lambda stub: stub.Status, request, timeout)

    def reset(self, nodes: Iterable[int], generation: int) -> dict[int, pb.NodeStatus | str]:
        """Have nodes discard all runs up to a generation. Return their answers like `ask`."""
        request = pb.ResetRequest(job=self.job.job, generation=generation, protocol=PROTOCOL)
        return self.ask(nodes, lambda stub: stub.Reset, request)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for step records, if there are keys. Raises `KeysError` if TLS refuses them."""
        return None if self.keys is None else client_context(self.keys)

    def renew(self, nodes: Iterable[int]) -> None:
        """Cancel all calls to nodes. The next call connects at once, and not when gRPC tries again."""
        with self._lock:
            for channel in filter(None, [self._channels.pop(node, None) for node in nodes]):
                channel.close()

    def close(self) -> None:
        """Close all channels, for good."""
        with self._lock:
            self._closed = True
            for channel in self._channels.values():
                channel.close()


def check_size(answer: R) -> R | str:
    """Return a node's answer with its texts cut, or in one sentence why it is none.

    It can be of another version of Checkmate, or have numbers that no training reaches.
    """
    wrong = ""
    if isinstance(answer, pb.NodeStatus):
        if different := mismatch(answer.protocol, "the node", "this host"):
            return different
        parts = sum(
            1 + max(span.last - span.first, 0) for group_parts in answer.parts for span in group_parts.ranges
        )
        if parts > PARTS_MAX:
            wrong = f"it reports {parts} parts of step records, and can have {PARTS_MAX}"
    if isinstance(answer, Message) and (wrong := wrong or bounded(answer)):
        return f"its answer is not a shadow node's: {wrong}"
    return answer


_DETAIL_MAX: Final = 2000
"""Characters of a node's message."""


def reason(error: Exception) -> str:
    """Return what went wrong with a node, in one line that follows the node's name."""
    if not isinstance(error, grpc.Call):
        return tls_fault(str(error)) or str(error) or type(error).__name__
    code, detail = error.code(), str(error.details() or "").partition("\n")[0]
    detail = shortened(detail, _DETAIL_MAX)
    if code in _REFUSALS and detail:
        return detail
    if code == grpc.StatusCode.UNAVAILABLE:
        return f"{UNREACHABLE}{unreached(detail)}"
    return _PLAIN.get(code) or f"{code.name}{detail and ': '}{detail}"


def refusal(error: grpc.RpcError) -> str:
    """Return a node's message if it has refused a call, or ""."""
    is_refusal = isinstance(error, grpc.Call) and error.code() in _REFUSALS
    return reason(error) if is_refusal else ""


def unreached(detail: str) -> str:
    """Return the reason in gRPC's message about a connection, e.g. ` (Connection refused)`."""
    match = _ROOT.search(detail) or _NAME.search(detail)
    why = tls_fault(detail) or (match["why"] if match else detail)
    return f" ({why})" if why else ""


_WORDS: Final = (
    (("certificate has expired", "alert certificate expired"), "a certificate has expired"),
    (
        ("certificate_verify_failed", "certificate verify failed", "hostname verification"),
        "its certificate is not one for this address by the authority in this host's folder of keys",
    ),
    (
        ("alert unknown ca", "alert_unknown_ca", "certificate required", "certificate_required"),
        "it does not accept this host's certificate, which is of another authority",
    ),
    (
        ("wrong_version_number", "wrong version number", "unexpected_eof", "has been closed (eof)"),
        "it does not use TLS: it runs with --insecure, or is an older version",
    ),
)
"""Texts of OpenSSL and BoringSSL, in lower case, with what they mean."""
_CLOSED: Final = ("failed to connect", "socket closed")
"""What gRPC reports without TLS if the node waits for a TLS handshake."""


def tls_fault(text: str) -> str | None:
    """Return what an error's text means for the user, or `None` if it is not about TLS."""
    lower = text.lower()
    for texts, words in _WORDS:
        if any(fragment in lower for fragment in texts):
            return words
    if all(fragment in lower for fragment in _CLOSED):
        return "it closed the connection: if it uses TLS, this process needs keys too"
    return None
