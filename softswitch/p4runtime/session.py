"""Streams of controllers: their queues and incoming messages (specification, section 16)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import grpc
from finsy.proto import p4r, rpc_code

from checkmate.base.waiting_calls import host_of_call
from softswitch.p4runtime.arbitration import Arbitration, Client
from softswitch.p4runtime.packetio import ControllerHeader
from softswitch.program.state import StatusError

log = logging.getLogger(__name__)

MAX_PACKETS = 1024
"""Frames that wait for a controller; further ones are dropped and counted."""
MAX_PACKET_BYTES = 8 << 20
"""Bytes of frames that wait for a controller."""
MAX_ERRORS = 16
MAX_MESSAGES = 64
"""Messages other than packets that wait for a controller; one that reads none of them is cut off."""
MAX_STREAMS = 32
MAX_HOST_STREAMS = 24
"""Streams of one host; the others are reserved for other hosts."""


class ControllerStream(Client):
    """The outgoing side of one stream, of which `cut_off` ends the call."""

    def __init__(self, host: str, cut_off: Callable[[], object]) -> None:
        self.host = host
        self.dropped = 0
        self._cut_off = cut_off
        self._condition = threading.Condition()
        self._messages: deque[p4r.StreamMessageResponse] = deque()
        self._packets: deque[tuple[ControllerHeader, bytes]] = deque()
        self._packet_bytes = 0
        self._closed = False
        self._error: StatusError | None = None

    def send(self, message: p4r.StreamMessageResponse) -> None:
        """Queue a message for the controller, or end its stream if it does not read."""
        with self._condition:
            if len(self._messages) < MAX_MESSAGES:
                self._messages.append(message)
            elif not self._closed:
                log.warning("a controller at %s is cut off: it does not read its messages", self.host)
                self._closed = True
                self._cut_off()
            self._condition.notify()

    def packet_in(self, header: ControllerHeader, frame: bytes) -> None:
        """Queue a frame for the controller."""
        with self._condition:
            if len(self._packets) >= MAX_PACKETS or self._packet_bytes >= MAX_PACKET_BYTES:
                self.dropped += 1
            else:
                self._packets.append((header, frame))
                self._packet_bytes += len(frame)
                self._condition.notify()

    def report(self, error: StatusError, packet: p4r.PacketOut | None) -> None:
        """Queue a StreamError, unless too many of them are waiting."""
        response = p4r.StreamMessageResponse()
        response.error.canonical_code = rpc_code.Code.Value(error.code)
        response.error.message = str(error)
        if packet is None:
            response.error.other.SetInParent()
        else:
            response.error.packet_out.packet_out.CopyFrom(packet)
        with self._condition:
            if len(self._messages) < MAX_ERRORS:
                self._messages.append(response)
                self._condition.notify()

    def close(self, error: StatusError | None = None) -> None:
        """End `responses`, with `error` if there is one."""
        with self._condition:
            self._closed = True
            self._error = self._error or error
            self._condition.notify()

    def responses(self) -> Iterator[p4r.StreamMessageResponse]:
        """Yield messages to send as they are queued; raise the error that ends the stream."""
        while True:
            with self._condition:
                while not (self._messages or self._packets or self._closed):
                    self._condition.wait()
                if self._error is not None:
                    raise self._error
                message = self._messages.popleft() if self._messages else None
                if message is None:
                    if self._closed:
                        return
                    header, frame = self._packets.popleft()
                    self._packet_bytes -= len(frame)
            yield message or p4r.StreamMessageResponse(packet=header.decode(frame))


class Sessions:
    """All streams of a device. Writes hold `control`, so that a new primary waits for earlier ones."""

    def __init__(
        self,
        arbitration: Arbitration,
        control: threading.RLock,
        packet_out: Callable[[p4r.PacketOut], None],
    ) -> None:
        self.unheard = 0
        """Number of frames for the controller while there was no primary."""
        self._dropped = 0
        self._arbitration = arbitration
        self._control = control
        self._packet_out = packet_out
        self._lock = threading.Lock()
        self._sessions: set[ControllerStream] = set()
        self._primaries: tuple[ControllerStream, ...] = ()

    @property
    def primaries(self) -> Sequence[ControllerStream]:
        """The primary of each role."""
        return self._primaries

    @property
    def dropped(self) -> int:
        """Number of frames for controllers that did not read fast enough."""
        return self._dropped + sum(session.dropped for session in list(self._sessions))

    def packet_in(self, header: ControllerHeader, frame: bytes) -> None:
        """Send a frame to each role's primary."""
        primaries = self._primaries
        if not primaries:
            self.unheard += 1
        for session in primaries:
            session.packet_in(header, frame)

    def serve(
        self, requests: Iterator[p4r.StreamMessageRequest], context: grpc.ServicerContext
    ) -> Iterator[p4r.StreamMessageResponse]:
        """Serve one stream to its end; raise `StatusError` if it ends with an error."""
        first = next(requests)
        if first.WhichOneof("update") != "arbitration":
            raise StatusError("FAILED_PRECONDITION", "a stream begins with arbitration")
        session = ControllerStream(host_of_call(context.peer()), context.cancel)
        self._enter(session)
        context.add_callback(session.close)
        messages = chain([first], requests)
        threading.Thread(target=self._listen, args=(session, messages), daemon=True).start()
        try:
            yield from session.responses()
        finally:
            self._leave(session)

    def _enter(self, session: ControllerStream) -> None:
        with self._lock:
            host_streams = sum(stream.host == session.host for stream in self._sessions)
            for count, limit, owner in (
                (len(self._sessions), MAX_STREAMS, "the switch"),
                (host_streams, MAX_HOST_STREAMS, f"host {session.host}"),
            ):
                if count >= limit:
                    raise StatusError(
                        "RESOURCE_EXHAUSTED", f"{owner} has {count} streams; {limit} are the limit"
                    )
            self._sessions.add(session)

    def _leave(self, session: ControllerStream) -> None:
        with self._lock:
            self._sessions.remove(session)
            self._dropped += session.dropped
            self._arbitration.leave(session)
            self._update_primaries()
        log.info("controller with election id %s left", session.election_id)

    def _update_primaries(self) -> None:
        self._primaries = tuple(filter(self._arbitration.is_primary, self._sessions))

    def _listen(self, session: ControllerStream, requests: Iterator[p4r.StreamMessageRequest]) -> None:
        """Handle a controller's messages until its stream ends."""
        error: StatusError | None = StatusError("INTERNAL", "a message could not be handled")
        try:
            for request in requests:
                self._take(session, request)
            error = None
        except grpc.RpcError:
            # The controller has left, which is how most streams end.
            error = None
        except StatusError as fault:
            error = fault
        finally:
            session.close(error)

    def _take(self, session: ControllerStream, request: p4r.StreamMessageRequest) -> None:
        kind = request.WhichOneof("update")
        if kind == "arbitration":
            self._arbitrate(session, request.arbitration)
        elif kind == "packet":
            self._packet(session, request.packet)
        else:
            error = StatusError("UNIMPLEMENTED", f"{kind} is not supported by this target")
            session.report(error, None)

    def _arbitrate(self, session: ControllerStream, message: p4r.MasterArbitrationUpdate) -> None:
        with self._lock:
            if session not in self._sessions:
                return
            primary = self._arbitration.update(session, message)
            self._update_primaries()
        log.info(
            "controller with election id %s is %s",
            session.election_id,
            "backup" if primary is None else "primary",
        )
        if primary is not None:
            with self._control, self._lock:
                if session in self._sessions:
                    self._arbitration.notify(primary)

    def _packet(self, session: ControllerStream, packet: p4r.PacketOut) -> None:
        try:
            if not self._arbitration.is_primary(session):
                raise StatusError("PERMISSION_DENIED", "only the primary may send packets")
            self._packet_out(packet)
        except StatusError as error:
            session.report(error, packet)
