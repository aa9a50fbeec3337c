"""The P4Runtime service of a switch (P4Runtime specification, sections 5 and 12 to 17).

Each RPC has its own thread, and ends with the status of a `StatusError` (`guard`). Writes, reads and pipeline
changes exclude one another (`_control`), and take turns with packets in small pieces, so that a large batch
does not delay traffic.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NoReturn

import grpc
from finsy.proto import p4r, rpc_code, rpc_status

from softswitch.p4runtime.arbitration import Arbitration
from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.p4runtime.pipeline import Pipeline, Undo, build, reconcile
from softswitch.p4runtime.reads import read
from softswitch.p4runtime.session import Sessions
from softswitch.p4runtime.writes import apply
from softswitch.program.state import StatusError
from softswitch.switch import SoftSwitch

log = logging.getLogger(__name__)

API_VERSION = "1.4.1"
ERROR_SPACE = "softswitch-v1model"
PIECE = 64
"""Updates, or entities read, between two turns of packets."""
RESPONSE_ENTITIES = 1000
MAX_RESPONSES = 1000
"""Messages of one answer, which is made before it is sent."""
MAX_QUERIES = 1024

Action = p4r.SetForwardingPipelineConfigRequest
Response = p4r.GetForwardingPipelineConfigRequest


class P4RuntimeService:
    """One device's P4Runtime service."""

    def __init__(self, switch: SoftSwitch, device_id: int) -> None:
        self.switch = switch
        self.arbitration = Arbitration(device_id)
        self._control = threading.RLock()
        self._committed_pipeline: Pipeline | None = None
        self._saved_pipeline: Pipeline | None = None
        self.sessions = Sessions(self.arbitration, self._control, self._packet_out)
        switch.on_packet_in = self._packet_in

    def commit(self, pipeline: Pipeline) -> None:
        """Run a pipeline from the next packet on."""
        with self._control:
            self._committed_pipeline, self._saved_pipeline = pipeline, None
            self.switch.install(pipeline.program, pipeline.packet_in.length, pipeline.sums_payload)
        log.info("pipeline set, cookie %#x", pipeline.config.cookie.cookie)

    @property
    def has_pipeline(self) -> bool:
        """True if a program is running."""
        return self._committed_pipeline is not None

    def _pipeline(self) -> Pipeline:
        pipeline = self._saved_pipeline or self._committed_pipeline
        if pipeline is None:
            raise StatusError("FAILED_PRECONDITION", "No forwarding pipeline config is set")
        return pipeline

    # Packets

    def _packet_in(self, frame: bytes) -> None:
        pipeline = self._committed_pipeline
        if pipeline is not None:
            self.sessions.packet_in(pipeline.packet_in, frame)

    def _packet_out(self, packet: p4r.PacketOut) -> None:
        pipeline = self._committed_pipeline
        if pipeline is None:
            raise StatusError("FAILED_PRECONDITION", "no pipeline is set")
        if self.switch.cpu_port is None:
            raise StatusError("FAILED_PRECONDITION", "the switch has no CPU port")
        self.switch.packet_out(pipeline.packet_out.encode(packet))

    def StreamChannel(
        self, request_iterator: Iterator[p4r.StreamMessageRequest], context: grpc.ServicerContext
    ) -> Iterator[p4r.StreamMessageResponse]:
        """Serve arbitration and packet I/O."""
        return self.sessions.serve(request_iterator, context)

    # Write and Read

    def Write(self, request: p4r.WriteRequest, context: grpc.ServicerContext) -> p4r.WriteResponse:
        """Apply a batch of updates."""
        if request.atomicity not in p4r.WriteRequest.Atomicity.values():
            raise invalid(f"atomicity {request.atomicity} does not exist")
        with self._control:
            self.check_primary(request)
            errors = self._batch(self._pipeline(), request)
        if any(errors):
            _abort_batch(context, errors, "the batch was not applied completely")
        return p4r.WriteResponse()

    def _batch(self, pipeline: Pipeline, request: p4r.WriteRequest) -> list[StatusError | None]:
        carry_on = request.atomicity == p4r.WriteRequest.CONTINUE_ON_ERROR
        # A whole batch in one turn is atomic with respect to packets.
        piece = len(request.updates) if request.atomicity == p4r.WriteRequest.DATAPLANE_ATOMIC else PIECE
        errors: list[StatusError | None] = []
        undo: Undo = []
        with _turns(self.switch, max(1, piece)) as step:
            for update in request.updates:
                step()
                try:
                    applied = apply(pipeline, update)
                    errors.append(None)
                    if not carry_on:
                        undo += applied
                except StatusError as error:
                    errors.append(error)
                    if not carry_on:
                        break
            if any(errors) and not carry_on:
                for back in reversed(undo):
                    back()
                return _rolled_back(errors, len(request.updates))
        return errors

    def Read(self, request: p4r.ReadRequest, context: grpc.ServicerContext) -> Iterator[p4r.ReadResponse]:
        """Answer queries, from the state between two writes."""
        if len(request.entities) > MAX_QUERIES:
            raise invalid(f"{len(request.entities)} queries in one read; it may have {MAX_QUERIES}")
        errors: list[StatusError | None] = []
        responses: list[p4r.ReadResponse] = []
        with self._control:
            self.arbitration.check_device(request.device_id)
            pipeline = self._pipeline()
            with _turns(self.switch, PIECE) as step:

                def add() -> p4r.Entity:
                    step()
                    if len(responses) == MAX_RESPONSES and len(responses[-1].entities) >= RESPONSE_ENTITIES:
                        raise StatusError(
                            "RESOURCE_EXHAUSTED",
                            f"more than {MAX_RESPONSES * RESPONSE_ENTITIES} entities match; ask for fewer",
                        )
                    if not responses or len(responses[-1].entities) >= RESPONSE_ENTITIES:
                        responses.append(p4r.ReadResponse())
                    return responses[-1].entities.add()

                for query in request.entities:
                    try:
                        read(pipeline, query, add)
                        errors.append(None)
                    except StatusError as error:
                        errors.append(error)
        yield from responses
        if any(errors):
            _abort_batch(context, errors, "not every query could be answered")

    # Pipeline configs and capabilities

    def SetForwardingPipelineConfig(
        self, request: p4r.SetForwardingPipelineConfigRequest, context: grpc.ServicerContext
    ) -> p4r.SetForwardingPipelineConfigResponse:
        """Verify, save or commit a pipeline."""
        with self._control:
            self.check_primary(request)
            self._set_pipeline(request)
        return p4r.SetForwardingPipelineConfigResponse()

    def _set_pipeline(self, request: p4r.SetForwardingPipelineConfigRequest) -> None:
        action = request.action
        if action == Action.COMMIT:
            if request.HasField("config"):
                raise invalid("COMMIT must not have a config: it commits the saved one")
            if self._saved_pipeline is None:
                raise StatusError("NOT_FOUND", "no config is saved; use VERIFY_AND_SAVE first")
            self.commit(self._saved_pipeline)
            return
        if action not in _WITH_CONFIG:
            raise invalid("the action is unspecified")
        if not request.HasField("config"):
            raise invalid(f"{Action.Action.Name(action)} needs a config")
        try:
            pipeline = build(request.config)
        except ValueError as error:
            raise invalid(str(error)) from None
        if action == Action.VERIFY_AND_SAVE:
            self._saved_pipeline = pipeline
        elif action == Action.VERIFY_AND_COMMIT:
            self.commit(pipeline)
        elif action == Action.RECONCILE_AND_COMMIT:
            if self._committed_pipeline is not None:
                with self.switch.turn():
                    reconcile(self._committed_pipeline, pipeline)
            self.commit(pipeline)

    def GetForwardingPipelineConfig(
        self, request: p4r.GetForwardingPipelineConfigRequest, context: grpc.ServicerContext
    ) -> p4r.GetForwardingPipelineConfigResponse:
        """Return the requested parts of the config."""
        if request.response_type not in Response.ResponseType.values():
            raise invalid(f"response_type {request.response_type} does not exist")
        response = p4r.GetForwardingPipelineConfigResponse()
        with self._control:
            self.arbitration.check_device(request.device_id)
            pipeline = self._saved_pipeline or self._committed_pipeline
            if pipeline is not None:
                response.config.CopyFrom(pipeline.config)
                for part in _LEFT_OUT.get(request.response_type, ()):
                    response.config.ClearField(part)
        return response

    def Capabilities(
        self, request: p4r.CapabilitiesRequest, context: grpc.ServicerContext
    ) -> p4r.CapabilitiesResponse:
        """Return the version of P4Runtime."""
        return p4r.CapabilitiesResponse(p4runtime_api_version=API_VERSION)

    def check_primary(self, request: p4r.WriteRequest | p4r.SetForwardingPipelineConfigRequest) -> None:
        """Raise `StatusError` unless a request, of which the head is enough, is the primary's."""
        self.arbitration.check_device(request.device_id)
        election_id = request.election_id if request.HasField("election_id") else None
        self.arbitration.check_primary(request.role, election_id)


_WITH_CONFIG = (
    Action.VERIFY,
    Action.VERIFY_AND_SAVE,
    Action.VERIFY_AND_COMMIT,
    Action.RECONCILE_AND_COMMIT,
)
_LEFT_OUT: dict[int, tuple[Literal["p4info", "p4_device_config"], ...]] = {
    Response.COOKIE_ONLY: ("p4info", "p4_device_config"),
    Response.P4INFO_AND_COOKIE: ("p4_device_config",),
    Response.DEVICE_CONFIG_AND_COOKIE: ("p4info",),
}


@contextmanager
def _turns(switch: SoftSwitch, piece: int) -> Iterator[Callable[[], None]]:
    """Yield a function that takes the switch's turn for a step, and releases it after every `piece` steps."""
    steps_left = 0
    with ExitStack() as turn:

        def step() -> None:
            nonlocal steps_left
            if not steps_left:
                turn.close()
                switch.let_packets_pass()
                turn.enter_context(switch.turn())
                steps_left = piece
            steps_left -= 1

        yield step


def _rolled_back(errors: list[StatusError | None], count: int) -> list[StatusError | None]:
    """Return each update's status after a rollback; only the one that failed has its own reason."""
    aborted = StatusError("ABORTED", "rolled back because another update of the batch failed")
    return [*(error or aborted for error in errors), *[aborted] * (count - len(errors))]


def _abort_batch(context: grpc.ServicerContext, errors: list[StatusError | None], message: str) -> NoReturn:
    """End an RPC with one p4.v1.Error for each element of its batch (specification, section 12.3)."""
    first = next((index, error) for index, error in enumerate(errors) if error is not None)
    summary = f"{message}: element {first[0]}: {first[1]}"
    status = rpc_status.Status(code=rpc_code.UNKNOWN, message=summary)
    for error in errors:
        detail = p4r.Error()
        if error is not None:
            detail.canonical_code = rpc_code.Code.Value(error.code)
            detail.message = str(error)
            detail.space = ERROR_SPACE
        status.details.add().Pack(detail)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.UNKNOWN, summary)
