"""The node's gRPC service: the RPCs of `shadow.proto`, with errors as gRPC status codes."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from checkmate.base.waiting_calls import CallGuard, CrowdsRefused, host_of_call
from checkmate.events.event_log import EventLog
from checkmate.job.addresses import split_address
from checkmate.job.schema import Job
from checkmate.keys.contexts import server_credentials
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc import shadow_pb2_grpc as rpc
from checkmate.rpc.channels import OPTIONS, SUPERSEDED
from checkmate.shadow.admission import CallerCheck
from checkmate.shadow.calls import begin, events, fence, leave, transfer
from checkmate.shadow.calls.begin import status
from checkmate.shadow.calls.meet import MeetingRoom
from checkmate.shadow.logic.group import CallRefused
from checkmate.shadow.logic.starts import StartEnded
from checkmate.shadow.node import Node
from checkmate.shadow.peers import Peers
from checkmate.shadow.receive.part_listener import buffer_of
from checkmate.shadow.replica.replica import ReplicaError
from checkmate.shadow.request_guard import IDLE_SECONDS, Handlers, RequestGuard
from checkmate.state import SeedReader, StateError
from checkmate.wire import tcp

log = logging.getLogger("checkmate")

R = TypeVar("R")

FETCH_SECONDS: Final = 600.0
"""Time limit of a Fetch without a deadline."""

_NAME: Final = "checkmate.v1.Shadow"
_HEALTH: Final = "grpc.health.v1.Health"
_RECOVERY: Final = (
    *("Status", "Fence", "Copy", "Parts", "Settle", "Begin", "Commit", "Check"),
    *("Reserve", "Release", "Reset", "Leave", "Refused"),
)
"""Methods with workers of their own, so that transfers of state cannot delay them."""
_SPARE: Final = 16
_MEETING: Final = ("Meet", "Store", "Conclude")
"""Methods by which ranks meet. A rank has one call of the first, and few of the second at a time."""
_CALLS_OF_MEETING: Final = 4
_READERS_OF_EVENTS: Final = 2
"""Workers that read files, which may take long."""
_MIN_CALLS: Final = 1024
GROWTH: Final = 8
"""Times by which a job may grow while a node runs: gRPC fixes some limits when a server is made."""
_CALLS_OF_RANK: Final = 12
"""Calls at a time: a rank reads all shards that a node has of its group, asks for its status, and meets."""
_OPTIONS: Final = (*OPTIONS, ("grpc.max_concurrent_streams", 128))
"""The second is the most calls of one connection at a time."""
_MIN_CONNECTIONS: Final = 256
_CONNECTIONS_OF_RANK: Final = 4
_FILES: Final = 65536
"""Descriptors that a node may have, if the hard limit allows as many."""
_BACKLOG: Final = 128


class ShadowService(rpc.ShadowServicer):
    """Translation of RPCs to functions over the node."""

    def __init__(self, node: Node, peers: Peers, log: EventLog | None, room: MeetingRoom) -> None:
        self._node, self._peers, self._log, self._room = node, peers, log, room

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        return self._answer(context, lambda: status(self._node, request))

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> pb.EventsReply:
        return self._answer(context, lambda: events.events(self._node, self._log, request))

    def Fence(self, request: pb.FenceRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        remaining, caller = _seconds_left(context), host_of_call(context.peer())
        return self._answer(
            context, lambda: fence.stop(self._node, request, remaining, context.is_active, caller)
        )

    def Copy(self, request: pb.CopyRequest, context: grpc.ServicerContext) -> pb.CopyReply:
        return self._answer(context, lambda: fence.copy(self._node, request))

    def Parts(self, request: pb.PartsRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordPart]:
        yield from self._answer(context, lambda: fence.parts(self._node, request))

    def Settle(self, request: pb.SettleRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        return self._answer(
            context,
            lambda: fence.settle(self._node, request, context.is_active),
        )

    def Reset(self, request: pb.ResetRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        return self._answer(context, lambda: fence.reset(self._node, request))

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        return self._answer(context, lambda: leave.leave(self._node, request))

    def Begin(self, request: pb.BeginRequest, context: grpc.ServicerContext) -> pb.BeginReply:
        caller = host_of_call(context.peer())
        return self._answer(context, lambda: begin.begin(self._node, request, caller))

    def Refused(self, request: pb.RefusedRequest, context: grpc.ServicerContext) -> pb.RefusedReply:
        self._answer(context, lambda: begin.keep_refusal(self._node, request))
        return pb.RefusedReply()

    def Seed(self, request_iterator: Iterator[pb.Seeds], context: grpc.ServicerContext) -> pb.SeedReply:
        return self._answer(
            context, lambda: pb.SeedReply(again=transfer.seed(self._node, SeedReader(request_iterator)))
        )

    def Reserve(self, request: pb.ReserveRequest, context: grpc.ServicerContext) -> pb.ReserveReply:
        return self._answer(context, lambda: transfer.reserve(self._node, request))

    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        self._answer(context, lambda: transfer.release(self._node, request.job, request.iteration))
        return pb.ReleaseReply()

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.Seeds]:
        try:
            yield from transfer.fetch(self._node, request, min(_seconds_left(context), FETCH_SECONDS))
        except (CallRefused, StateError, LookupError) as error:
            _abort(context, error)

    def Commit(
        self, request_iterator: Iterator[pb.Progress], context: grpc.ServicerContext
    ) -> Iterator[pb.Decision]:
        call_end = threading.Event()
        context.add_callback(call_end.set)
        try:
            yield from self._peers.answer(request_iterator, call_end)
        except CallRefused as error:
            _abort(context, error)

    def Meet(self, request: pb.MeetRequest, context: grpc.ServicerContext) -> Iterator[pb.MeetEvent]:
        try:
            yield from self._room.meet(request, context.is_active, context.add_callback)
        except CallRefused as error:
            _abort(context, error)

    def Store(self, request: pb.StoreRequest, context: grpc.ServicerContext) -> pb.StoreReply:
        return self._answer(context, lambda: self._room.store(request))

    def Conclude(self, request: pb.ConcludeRequest, context: grpc.ServicerContext) -> pb.ConcludeReply:
        return self._answer(context, lambda: self._room.conclude(request))

    def _answer(self, context: grpc.ServicerContext, call: Callable[[], R]) -> R:
        try:
            return call()
        except (CallRefused, StateError, ReplicaError) as error:
            _abort(context, error)


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    before = isinstance(error, CallRefused) and error.precondition
    code = grpc.StatusCode.FAILED_PRECONDITION if before else grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, StartEnded):
        code = SUPERSEDED
    context.abort(code, str(error))


def _seconds_left(context: grpc.ServicerContext) -> float:
    """Return the seconds until the caller's deadline."""
    seconds = context.time_remaining()
    return FETCH_SECONDS if seconds is None else max(0.0, seconds)


class ServeError(RuntimeError):
    """The node cannot serve; the message has the reason."""

    exit_code = 1


def check_address(job: Job, node_id: int) -> None:
    """Raise `ServeError` if the mgmt address cannot be bound; gRPC itself only prints the reason."""
    _listen(split_address(job.node(node_id).mgmt), _mgmt_words(job, node_id), node_id).close()


def records_listener(job: Job, node_id: int, receive_buffer: int | None) -> socket.socket:
    """Return a socket that listens at a node's address for step records.

    A connection's buffer holds what comes while the node is stopped: no record is lost with a rank that dies.

    Args:
        job: the node's job.
        node_id: the node's id in the job.
        receive_buffer: bytes of each connection's buffer, which need CAP_NET_ADMIN; `None`: as for streams of
            parts, as far as any user may have that.

    Raises:
        ServeError: if the address cannot be used.
    """
    host, port = job.node(node_id).records_at
    label = f"{host}:{port}, the address of shadow node {node_id} for step records,"
    if receive_buffer is not None:
        return _listen((host, port), label, node_id, {tcp.SO_RCVBUFFORCE: receive_buffer})
    return _listen((host, port), label, node_id, {socket.SO_RCVBUF: _half_buffer(job)})


def share_buffers(listener: socket.socket, job: Job) -> None:
    """Have later connections for step records share the budget of buffers among a job's ranks.

    `listener`: a socket of `records_listener` without a `receive_buffer`.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _half_buffer(job))


def _half_buffer(job: Job) -> int:
    """Return half the bytes of a connection's buffer: the kernel doubles it (man 7 socket)."""
    return buffer_of(job.rank_count) // 2


def gradients_listener(job: Job, node_id: int) -> socket.socket:
    """Return a socket that listens at a node's address for gradients.

    Raises:
        ServeError: if the address cannot be used.
    """
    host, port = job.node(node_id).gradients_at
    label = f"{host}:{port}, the address of shadow node {node_id} for gradients,"
    return _listen((host, port), label, node_id)


def _listen(
    address: tuple[str, int], label: str, node_id: int, options: Mapping[int, int] = MappingProxyType({})
) -> socket.socket:
    """Listen with these options of the socket, which each connection inherits."""
    try:
        (family, kind, _, _, place), *_ = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option, value in options.items():  # before the handshake, which fixes the window's scale
                listener.setsockopt(socket.SOL_SOCKET, option, value)
            listener.bind(place)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: f"is in use; is shadow node {node_id} running already?",
            errno.EADDRNOTAVAIL: "is not an address of this machine; "
            "start a shadow node of a lab in its own namespace",
        }
        why = reasons.get(error.errno or 0, f"can't be used: {error.strerror or error}")
        raise ServeError(f"{label} {why}") from None
    return listener


def _mgmt_words(job: Job, node_id: int) -> str:
    return f"{job.node(node_id).mgmt}, the mgmt address of shadow node {node_id},"


def _fetches(ranks: int) -> int:
    return 2 * ranks + _SPARE


def max_calls(ranks: int) -> int:
    """Return how many calls a node takes at a time, by the number of ranks in its job."""
    return max(_MIN_CALLS, _CALLS_OF_RANK * ranks)


def max_connections(ranks: int) -> int:
    """Return how many gRPC connections a node accepts, so that it has descriptors for all else.

    Strangers' idle connections end after `HANDSHAKE_SECONDS`. Raises the soft limit of descriptors if it can.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (target := min(hard, _FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return min(_MIN_CONNECTIONS + _CONNECTIONS_OF_RANK * ranks, soft // 2)


class Workers(ThreadPoolExecutor):
    """The threads of some methods, which may become more."""

    @property
    def most(self) -> int:
        """How many there are at most."""
        return self._max_workers

    def grow(self, most: int) -> None:
        """Have as many at most, if those are more than before. They start as calls come."""
        self._max_workers = max(self._max_workers, most)


class Server:
    """The gRPC server at a node's `mgmt` address, with TLS if the node has keys. A context manager."""

    def __init__(self, node: Node, peers: Peers, log: EventLog | None = None) -> None:
        """Bind the address, to serve also the events of `log`. Raise `ServeError` if that fails."""
        job = node.job
        ranks = job.rank_count
        recovery = 2 * len(job.shadow_nodes) + _SPARE
        self._pool = Workers(_fetches(ranks), thread_name_prefix="fetches")
        self._recovery = ThreadPoolExecutor(recovery, thread_name_prefix="recovery")
        self._seeds = Workers(ranks + _SPARE, thread_name_prefix="seeds")
        meeting = _CALLS_OF_MEETING * ranks + _SPARE
        self._meeting = ThreadPoolExecutor(meeting, thread_name_prefix="meeting")
        self._events = ThreadPoolExecutor(_READERS_OF_EVENTS, thread_name_prefix="events")
        keys = node.access.keys
        checks: list[grpc.ServerInterceptor] = [] if keys is None else [CallerCheck(job)]
        options = (*_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections(GROWTH * ranks)))
        self._most_ranks = GROWTH * ranks
        calls = max_calls(GROWTH * ranks)
        self._server = grpc.server(
            self._pool, interceptors=checks, options=options, maximum_concurrent_rpcs=calls
        )
        self._calls = CallGuard(CrowdsRefused(IDLE_SECONDS))
        self._room = MeetingRoom(job)
        self._add(_NAME, rpc.add_ShadowServicer_to_server, ShadowService(node, peers, log, self._room))
        self._health = health.HealthServicer()
        self._add(_HEALTH, health_pb2_grpc.add_HealthServicer_to_server, self._health)
        address = job.node(node.id).mgmt
        try:
            if keys is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, server_credentials(keys))
        except RuntimeError as error:  # taken since `check_address`
            raise ServeError(f"{_mgmt_words(job, node.id)} can't be used: {error}") from None

    def follow(self, job: Job) -> None:
        """Have workers enough for a job whose ranks have changed. Those that meet are of the first one."""
        ranks = job.rank_count
        self._pool.grow(_fetches(ranks))
        self._seeds.grow(ranks + _SPARE)
        if ranks > self._most_ranks:
            log.warning(
                "the job has %d ranks now, and this node takes calls of %d at most: start it again before "
                "training restarts the next time",
                ranks,
                self._most_ranks,
            )

    def _add(self, name: str, add: Callable[[Any, Any], None], servicer: object) -> None:
        """Add a generated service to the server, guarded."""
        collected = Handlers()
        add(servicer, collected)
        handlers = {method: handler for method, handler in collected.by_method.items() if method != "Watch"}
        pools = {
            **dict.fromkeys(_RECOVERY, self._recovery),
            **dict.fromkeys(_MEETING, self._meeting),
            "Seed": self._seeds,
            "Events": self._events,
        }
        guarded = RequestGuard(self._calls).handlers(handlers, pools)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, guarded),))

    def __enter__(self) -> Server:
        self._calls.start()
        self._server.start()
        for name in ("", _NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self

    def __exit__(self, *_: object) -> None:
        self._health.enter_graceful_shutdown()
        self._room.stop()
        self._server.stop(0.2).wait()
        self._calls.stop()
        for pool in (self._pool, self._recovery, self._seeds, self._meeting, self._events):
            pool.shutdown()
