"""One switch over P4Runtime: the pipeline, reading, writing, packets.

`controller` decides what is written; this only carries it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn

import grpc
from finsy.grpcutil import GRPCStatusCode
from finsy.p4client import P4ClientError
from finsy.p4entity import P4PacketIn, P4PacketOut
from finsy.proto import U128, p4r, p4r_grpc

from checkmate.job.schema import Switch
from checkmate.wording import counted
from controlplane.entities import Holdings
from controlplane.errors import ControlError, SwitchUnreachable, Unsure, WriteRefused, WrongPipeline
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.connection import GONE, SwitchConnection
from controlplane.reconcile import Update, batches

BATCH = 250
"""Updates a Write request. A refusal has some 100 to 200 bytes for each of them in gRPC's trailing
metadata, of which a client takes 64 KB; with more, the details would be lost."""
HEARTBEAT_SECONDS = 5.0
LOAD_SECONDS = 120.0
"""For loading a program; finsy's own ten are for everything."""


class NoProgram(WrongPipeline):
    """The switch runs no program yet."""


class SwitchSession(SwitchConnection):
    """A P4Runtime session with one switch; use as an async context manager.

    Without `primary` it only reads, beside whatever controller there is.
    """

    def __init__(
        self, switch: Switch, codec: Codec, *, primary: bool = True, timeout: float | None = None
    ) -> None:
        super().__init__(switch, primary=primary, timeout=timeout)
        self.codec = codec

    async def ensure_pipeline(self, *, replace: bool = False) -> bool:
        """See that the switch runs our program; load it where there is none, or with `replace`.

        True where it was loaded, so that the switch holds nothing. Raises `WrongPipeline`.
        """
        config = await self._pipeline()
        if config is not None and not replace:
            if self.codec.schema.has_p4info(config.p4info):
                self._same_build(config)
                return False
            tables = ", ".join(sorted(table.preamble.alias for table in config.p4info.tables)) or "none"
            raise WrongPipeline(
                f"{self._name} runs another program (its tables: {tables}); "
                "`checkmate run --load` replaces it, and ends whatever uses it"
            )
        request = p4r.SetForwardingPipelineConfigRequest(
            device_id=self.switch.device_id,
            election_id=U128.encode(self._election),
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=self.codec.pipeline_config(),
        )
        try:
            await self._load(request)
        except P4ClientError as error:
            if error.code in (*GONE, GRPCStatusCode.PERMISSION_DENIED):
                raise self._failed("loading the program", error) from None
            raise WrongPipeline(f"{self._name} refuses the program: {error.message}") from None
        return True

    async def _load(self, request: p4r.SetForwardingPipelineConfigRequest) -> None:
        """As the client's `request`, but a chip that is initialised anew has its time."""
        channel = self._client.channel
        assert channel is not None
        try:
            await p4r_grpc.P4RuntimeStub(channel).SetForwardingPipelineConfig(request, timeout=LOAD_SECONDS)
        except grpc.RpcError as error:
            raise P4ClientError(error, "loading the program") from None

    def _same_build(self, config: p4r.ForwardingPipelineConfig) -> None:
        """Programs of one P4Info may differ inside; whoever loads without a cookie isn't told apart."""
        if self.codec.cookie is not None and config.cookie.cookie not in (0, self.codec.cookie):
            raise WrongPipeline(
                f"{self._name} runs another build of Checkmate's program; `checkmate run --load` replaces it"
            )

    async def check_pipeline(self) -> None:
        """For readers: raise `WrongPipeline` where the switch doesn't run our program."""
        config = await self._pipeline()
        if config is None:
            raise NoProgram(f"{self._name} runs no program; `checkmate run` loads Checkmate's")
        if not self.codec.schema.has_p4info(config.p4info):
            raise WrongPipeline(f"{self._name} runs another program; `checkmate run` loads Checkmate's")

    async def heartbeat(self) -> None:
        """Ask something small now and then; raises `SwitchUnreachable` when no answer comes.

        An idle connection tells nothing of a peer that lost its power.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._pipeline(p4r.GetForwardingPipelineConfigRequest.COOKIE_ONLY)

    async def _pipeline(
        self,
        what: p4r.GetForwardingPipelineConfigRequest.ResponseType.ValueType = (
            p4r.GetForwardingPipelineConfigRequest.P4INFO_AND_COOKIE
        ),
    ) -> p4r.ForwardingPipelineConfig | None:
        self._open()
        request = p4r.GetForwardingPipelineConfigRequest(device_id=self.switch.device_id, response_type=what)
        try:
            reply = await self._client.request(request)
        except P4ClientError as error:
            if error.is_pipeline_missing:
                return None
            raise self._failed("reading its program", error) from None
        return reply.config if reply.config.p4info.tables else None

    async def read(self) -> Holdings:
        """All that the switch holds."""
        found = [self.codec.decode(entity) async for entity in self.read_entities(self.codec.read_all())]
        return Holdings.of(entity for entity in found if entity is not None)

    async def read_entities(self, asked: Sequence[p4r.Entity]) -> AsyncIterator[p4r.Entity]:
        """P4Runtime's own messages for what is asked, wildcards filled in."""
        self._open()
        request = p4r.ReadRequest(device_id=self.switch.device_id, entities=asked)
        try:
            async for reply in self._client.request_iter(request):
                for entity in reply.entities:
                    yield entity
        except P4ClientError as error:
            raise self._failed("reading", error) from None

    async def write(self, updates: Sequence[Update], progress: Callable[[int], None] | None = None) -> None:
        """Apply updates in order. Where one is refused, all are undone and `WriteRefused` names it.

        `Unsure` (a `WriteRefused`) where the undoing failed too, or the switch's details were lost.
        """
        applied: list[Update] = []
        for batch in batches(updates, BATCH):
            refused = await self._write_batch(batch)
            applied += [update for index, update in enumerate(batch) if index not in refused]
            if refused:
                await self._undo(batch, refused, applied)
            if progress is not None:
                progress(len(batch))

    async def _write_batch(self, batch: Sequence[Update]) -> dict[int, str]:
        """The refused updates by index, each with the switch's words."""
        self._open()
        request = p4r.WriteRequest(
            device_id=self.switch.device_id,
            election_id=U128.encode(self._election),
            updates=[self.codec.encode_update(update) for update in batch],
        )
        try:
            await self._client.request(request)
        except P4ClientError as error:
            if not error.details:
                failed = self._failed(f"writing {batch[0]}", error)
                raise Unsure(str(failed)) if isinstance(failed, WriteRefused) else failed from None
            return {
                index: f"{detail.canonical_code.name}: {detail.message}"
                for index, detail in error.details.items()
            }
        return {}

    async def _undo(
        self, batch: Sequence[Update], refused: dict[int, str], applied: Sequence[Update]
    ) -> NoReturn:
        index, words = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        message = f"{self._name} refuses to {batch[index]}{more}: {words}"
        failed = 0
        try:
            for back in batches([update.undone() for update in reversed(applied)], BATCH):
                failed += len(await self._write_batch(back))
        except ControlError as error:
            raise Unsure(f"{message}; undoing what was applied before it failed: {error}") from None
        if failed:
            raise Unsure(f"{message}; {failed} of {counted(len(applied), 'update')} could not be undone")
        raise WriteRefused(f"{message}; what was applied before it is undone")

    async def send_packet(self, port: int, frame: bytes) -> None:
        """A frame out of one of the switch's ports."""
        self._open()
        message = P4PacketOut(frame, egress_port=port, padding=0).encode_update(self.codec.schema)
        try:
            await self._client.send(message)
        except P4ClientError as error:
            raise self._failed("a packet-out", error) from None

    async def packets(self) -> AsyncIterator[tuple[int, bytes]]:
        """(ingress port, frame) of each packet-in; ends by raising what ends the session."""
        while True:
            self._open()
            try:
                message = await self._client.receive()
            except P4ClientError as error:
                raise self._failed("serving", error) from None
            except RuntimeError as error:  # finsy's word for the stream's regular end
                raise SwitchUnreachable(f"{self._name} closed the session: {error}") from None
            if message.HasField("packet"):
                packet = P4PacketIn.decode(message, self.codec.schema)
                yield int(packet["ingress_port"]), packet.payload
            elif message.HasField("arbitration") and message.arbitration.status.code != GRPCStatusCode.OK:
                raise self._another_primary()
