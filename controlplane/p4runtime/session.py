"""One switch over P4Runtime: the pipeline, reading, writing, packets.

`reconciling` decides on the updates; this module sends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn

import grpc
from finsy.grpcutil import GRPCStatusCode
from finsy.p4client import P4ClientError
from finsy.p4entity import P4PacketIn, P4PacketOut
from finsy.proto import U128, p4i, p4r, p4r_grpc

from checkmate.base.wording import counted
from checkmate.job.schema import Switch
from controlplane.election import Candidacy, Primary, ServerStanding
from controlplane.entities import Holdings, Update, batches
from controlplane.errors import (
    ControlError,
    SwitchUnreachable,
    Unsure,
    WriteRefused,
    WrongPipeline,
)
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.connection import GONE_CODES, NO_DEVICE, SwitchConnection, parse_standing

BATCH = 250
"""Updates in a Write request. A refusal has 100 to 200 bytes of details for each update in gRPC's trailing
metadata, and a client accepts at most 64 KB of those."""
HEARTBEAT_SECONDS = 5.0
ASK_SECONDS = 0.25
LOAD_SECONDS = 120.0
"""Time for loading a program; finsy's default of ten seconds is too short."""


class NoProgram(WrongPipeline):
    """The switch runs no program yet."""


class SwitchSession(SwitchConnection):
    """A P4Runtime session with one switch; use as an async context manager.

    Without a candidacy it only reads, beside any controller that is there.
    """

    def __init__(
        self,
        switch: Switch,
        codec: Codec,
        *,
        candidacy: Candidacy | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(switch, candidacy=candidacy, timeout=timeout)
        self.codec = codec
        self._renewed = asyncio.Event()

    async def ensure_pipeline(self, *, replace: bool = False) -> bool:
        """Load our program if the switch runs none, or with `replace`.

        Returns:
            True if it was loaded, so that the switch holds no entries.

        Raises:
            WrongPipeline: The switch runs another program, or refuses ours.
        """
        config = await self._pipeline()
        if config is not None and not replace:
            if self.codec.schema.has_p4info(config.p4info):
                self._same_build(config)
                return False
            tables = ", ".join(sorted(table.preamble.alias for table in config.p4info.tables)) or "none"
            raise WrongPipeline(
                f"{self._name} runs another program (its tables: {tables}); "
                "`checkmate run --load` replaces it, and ends everything that uses it"
            )
        request = p4r.SetForwardingPipelineConfigRequest(
            device_id=self.switch.device_id,
            election_id=U128.encode(self._election.number),
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=self.codec.pipeline_config(),
        )
        try:
            await self._load(request)
        except P4ClientError as error:
            if error.code in (*GONE_CODES, GRPCStatusCode.PERMISSION_DENIED) or error.message == NO_DEVICE:
                raise self._translate_error("loading the program", error) from None
            raise WrongPipeline(f"{self._name} refuses the program: {error.message}") from None
        return True

    async def _load(self, request: p4r.SetForwardingPipelineConfigRequest) -> None:
        """Send the request like `P4Client.request`, with enough time for a chip to be initialised again."""
        channel = self._client.channel
        assert channel is not None
        try:
            await p4r_grpc.P4RuntimeStub(channel).SetForwardingPipelineConfig(request, timeout=LOAD_SECONDS)
        except grpc.RpcError as error:
            raise P4ClientError(error, "loading the program") from None

    def _same_build(self, config: p4r.ForwardingPipelineConfig) -> None:
        """Raise `WrongPipeline` if the cookie shows another build of the same P4Info."""
        if self.codec.cookie is not None and config.cookie.cookie not in (0, self.codec.cookie):
            raise WrongPipeline(
                f"{self._name} runs another build of Checkmate's program; `checkmate run --load` replaces it"
            )

    async def check_pipeline(self) -> None:
        """Raise `WrongPipeline` if the switch does not run our program; for sessions that only read."""
        config = await self._pipeline()
        if config is None:
            raise NoProgram(f"{self._name} runs no program; `checkmate run` loads Checkmate's")
        if not self.codec.schema.has_p4info(config.p4info):
            raise WrongPipeline(f"{self._name} runs another program; `checkmate run` loads Checkmate's")

    async def program(self) -> p4i.P4Info | None:
        """Return the P4Info of the switch's program, or `None` without one."""
        config = await self._pipeline()
        return None if config is None else config.p4info

    async def heartbeat(self) -> None:
        """Probe the switch periodically; raise `SwitchUnreachable` if it stops answering.

        An idle connection does not notice that its peer lost power.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._pipeline(p4r.GetForwardingPipelineConfigRequest.COOKIE_ONLY)

    async def _pipeline(
        self,
        response_type: p4r.GetForwardingPipelineConfigRequest.ResponseType.ValueType = (
            p4r.GetForwardingPipelineConfigRequest.P4INFO_AND_COOKIE
        ),
    ) -> p4r.ForwardingPipelineConfig | None:
        self._open()
        request = p4r.GetForwardingPipelineConfigRequest(
            device_id=self.switch.device_id, response_type=response_type
        )
        try:
            reply = await self._client.request(request)
        except P4ClientError as error:
            if error.is_pipeline_missing:
                return None
            raise self._translate_error("reading its program", error) from None
        return reply.config if reply.config.p4info.tables else None

    async def read(self, tables: Sequence[str] = ()) -> Holdings:
        """Return all that the switch holds, or only what is in some tables."""
        if tables:
            reads = self.codec.read_tables(tables)
            return self.codec.decode_entries([entity async for entity in self.read_entities(reads)])
        return self.codec.decode_all([entity async for entity in self.read_entities(self.codec.read_all())])

    async def read_entities(self, reads: Sequence[p4r.Entity]) -> AsyncIterator[p4r.Entity]:
        """Yield P4Runtime's own messages for the entities in `reads`, wildcards expanded."""
        self._open()
        request = p4r.ReadRequest(device_id=self.switch.device_id, entities=reads)
        try:
            async for reply in self._client.request_iter(request):
                for entity in reply.entities:
                    yield entity
        except P4ClientError as error:
            raise self._translate_error("reading", error) from None

    async def write(self, updates: Sequence[Update], progress: Callable[[int], None] | None = None) -> None:
        """Apply updates in order; undo all of them if the switch refuses one.

        Args:
            updates: The updates, in the order of `entities.difference`.
            progress: Called with the number of updates in each batch that was written.

        Raises:
            WriteRefused: The switch refused an update. All updates were undone.
            Unsure: Undoing failed too, or the switch's details were lost.
        """
        applied: list[Update] = []
        for batch in batches(updates, BATCH):
            refusals = await self._write_batch(batch)
            applied += [update for index, update in enumerate(batch) if index not in refusals]
            if refusals:
                await self._undo(batch, refusals, applied)
            if progress is not None:
                progress(len(batch))

    async def _write_batch(self, batch: Sequence[Update]) -> dict[int, str]:
        """Return the refused updates by index, each with the switch's message."""
        self._open()
        request = p4r.WriteRequest(
            device_id=self.switch.device_id,
            election_id=U128.encode(self._election.number),
            updates=[self.codec.encode_update(update) for update in batch],
        )
        try:
            await self._client.request(request)
        except P4ClientError as error:
            if not error.details:
                failed = self._translate_error(f"writing {batch[0]}", error)
                raise Unsure(str(failed)) if isinstance(failed, WriteRefused) else failed from None
            return {
                index: f"{detail.canonical_code.name}: {detail.message}"
                for index, detail in error.details.items()
            }
        return {}

    async def _undo(
        self, batch: Sequence[Update], refusals: dict[int, str], applied: Sequence[Update]
    ) -> NoReturn:
        index, words = next(iter(refusals.items()))
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        message = f"{self._name} refuses to {batch[index]}{more}: {words}"
        failed = 0
        try:
            for undo_batch in batches([update.undone() for update in reversed(applied)], BATCH):
                failed += len(await self._write_batch(undo_batch))
        except ControlError as error:
            raise Unsure(f"{message}; undoing what was applied before it failed: {error}") from None
        if failed:
            raise Unsure(f"{message}; {failed} of {counted(len(applied), 'update')} could not be undone")
        raise WriteRefused(f"{message}; what was applied before it is undone")

    async def send_packet(self, port: int, frame: bytes) -> None:
        """Send a frame out of one of the switch's ports."""
        self._open()
        message = P4PacketOut(frame, egress_port=port, padding=0).encode_update(self.codec.schema)
        try:
            await self._client.send(message)
        except P4ClientError as error:
            raise self._translate_error("a packet-out", error) from None

    async def packets(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (ingress port, frame) of each packet-in, until the session ends with an exception."""
        while True:
            message = await self._receive("serving")
            if message.HasField("packet"):
                packet = P4PacketIn.decode(message, self.codec.schema)
                yield int(packet["ingress_port"]), packet.payload
            elif message.HasField("arbitration"):
                self._take(parse_standing(message.arbitration))

    async def standings(self) -> AsyncIterator[ServerStanding]:
        """Yield who is primary, now and after each change. For a session that waits, without a candidacy."""
        yield await self.ask()
        while True:
            message = await self._receive("waiting")
            if message.HasField("arbitration"):
                yield parse_standing(message.arbitration)

    async def _receive(self, operation: str) -> p4r.StreamMessageResponse:
        self._open()
        try:
            return await self._client.receive()
        except P4ClientError as error:
            raise self._translate_error(operation, error) from None
        except RuntimeError as error:  # finsy's error for the regular end of the stream
            raise SwitchUnreachable(f"{self._name} closed the session: {error}") from None

    async def ask_again(self) -> None:
        """Ask who is primary again and again, for ever: BMv2's server does not tell of a new election id."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            if self.switch.target != "softswitch":
                await self._ask_without_answer()

    async def renew(self, candidacy: Candidacy) -> None:
        """Have the election id name other job files. `packets` must be read meanwhile, and nothing written.

        Raises:
            SwitchUnreachable: The switch has not answered.
        """
        self._renewed.clear()
        bid = candidacy.bid(ServerStanding(Primary.THIS, self._election))
        assert bid is not None
        try:
            await self._client.send(p4r.StreamMessageRequest(arbitration=self._update(bid.number)))
            await asyncio.wait_for(self._renewed.wait(), self._timeout)
        except P4ClientError as error:
            raise self._translate_error("arbitration", error) from None
        except TimeoutError:
            raise SwitchUnreachable(f"{self._name} doesn't answer the arbitration") from None

    @property
    def term(self) -> int:
        """The term of its election id."""
        return self._election.term

    def _take(self, standing: ServerStanding) -> None:
        """Take what the server says while this controller serves."""
        if standing.primary is not Primary.THIS:
            raise self._another_primary()
        if standing.highest is not None and standing.highest.term > self._election.term:
            self._election = standing.highest
            self._renewed.set()
