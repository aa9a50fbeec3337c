"""Connection to a switch's P4Runtime server: arbitration, TLS, and translation of its errors.

`session` reads and writes over it.
"""

from __future__ import annotations

import asyncio
import random
import time
from types import TracebackType
from typing import Final, Self

from finsy.grpcutil import GRPCCredentialsTLS, GRPCStatusCode
from finsy.p4client import P4Client, P4ClientError, P4RpcStatus
from finsy.proto import U128, p4r

from checkmate.job.schema import Switch, Tls
from controlplane.election import Candidacy, ElectionId, Primary, ServerStanding
from controlplane.errors import AnotherPrimary, RefusalLost, SwitchUnreachable, WriteRefused

REACH_SECONDS = 5.0
"""Default time for a switch to answer."""
LEAVE_SECONDS = 1.0
"""Time for which a controller that has just ended may still be the switch's primary."""
_BIDS: Final = 4
"""Bids for one switch, each above the id that another controller has had meanwhile."""
_WAITING_IDS: Final = range(1 << 8, 1 << 32)
"""Above the id of `checkmate shell` (`checkmate.cli.shell.BACKUP`)."""
_PRIMARY: Final = {
    GRPCStatusCode.OK: Primary.THIS,
    GRPCStatusCode.ALREADY_EXISTS: Primary.ANOTHER,
    GRPCStatusCode.NOT_FOUND: Primary.NOBODY,
}
_LOST_REFUSAL: Final = (GRPCStatusCode.INTERNAL, "Internal error from Core")
"""The error of gRPC's asyncio client if the server refused a call while the call was being opened."""
NO_DEVICE: Final = "Error when trying to assign device"
"""BMv2 takes any device id in the arbitration, and says this when a program is loaded."""
GONE_CODES: Final = (GRPCStatusCode.UNAVAILABLE, GRPCStatusCode.DEADLINE_EXCEEDED, GRPCStatusCode.CANCELLED)


class SwitchConnection:
    """A connection with one switch; use as an async context manager.

    With a candidacy it becomes primary. Without one, it skips arbitration, so it can only read.
    """

    def __init__(
        self, switch: Switch, *, candidacy: Candidacy | None = None, timeout: float | None = None
    ) -> None:
        self.switch = switch
        self._candidacy = candidacy
        self.earlier_election: ElectionId | None = None
        """The highest election id that the server knew before this connection."""
        self._timeout = REACH_SECONDS if timeout is None else timeout
        self._client = self._new_client()

    def _new_client(self) -> P4Client:
        return P4Client(self.switch.address, _credentials(self.switch.tls), wait_for_ready=False)

    async def __aenter__(self) -> Self:
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            try:
                await self._enter()
                return self
            except (AnotherPrimary, RefusalLost):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(LEAVE_SECONDS / 10)
            self._client = self._new_client()

    async def _enter(self) -> None:
        await self._client.open()
        try:
            await self._reach()
            if self._candidacy is not None:
                await self._become_primary(self._candidacy)
        except BaseException:
            await self._client.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    @property
    def _name(self) -> str:
        return f"switch {self.switch.name} at {self.switch.address}"

    async def _reach(self) -> None:
        channel = self._client.channel
        assert channel is not None
        try:
            await asyncio.wait_for(channel.channel_ready(), self._timeout)
        except TimeoutError:
            tls = " with TLS" if self.switch.tls else ""
            raise SwitchUnreachable(
                f"{self._name} doesn't answer{tls} within {self._timeout:g} s; "
                "is its P4Runtime server running, and is `address` in the job's fabric right?"
            ) from None

    async def _become_primary(self, candidacy: Candidacy) -> None:
        """Ask who is primary, and bid; raise `AnotherPrimary` if that is not to be displaced."""
        standing = await self.ask()
        self.earlier_election = standing.highest
        for _ in range(_BIDS):
            bid = candidacy.bid(standing)
            if bid is None:
                break
            standing = await self._arbitrate(bid.number)
            if standing.primary is Primary.THIS:
                self._election = bid
                return
        raise self._another_primary()

    async def ask(self) -> ServerStanding:
        """Ask who is primary, as a controller that waits.

        Such a one has no election id. BMv2's server takes that for 0, and refuses a second one; there, it has
        a low one of its own. The server may then make it primary unasked.
        """
        return await self._arbitrate(self._waiting_id())

    def _waiting_id(self) -> int | None:
        return None if self.switch.target == "softswitch" else random.choice(_WAITING_IDS)

    async def _ask_without_answer(self) -> None:
        """Send what `ask` sends; whoever reads the stream gets the answer."""
        try:
            await self._client.send(p4r.StreamMessageRequest(arbitration=self._update(self._waiting_id())))
        except P4ClientError as error:
            raise self._translate_error("arbitration", error) from None

    def _update(self, election: int | None) -> p4r.MasterArbitrationUpdate:
        update = p4r.MasterArbitrationUpdate(device_id=self.switch.device_id)
        if election is not None:
            update.election_id.CopyFrom(U128.encode(election))
        return update

    async def _arbitrate(self, election: int | None) -> ServerStanding:
        try:
            await self._client.send(p4r.StreamMessageRequest(arbitration=self._update(election)))
            return await asyncio.wait_for(self._answer_to(election), self._timeout)
        except P4ClientError as error:
            if error.is_election_id_used:
                raise self._another_primary() from None
            raise self._translate_error("arbitration", error) from None
        except (TimeoutError, RuntimeError):  # finsy's RuntimeError: the stream ended
            raise SwitchUnreachable(f"{self._name} doesn't answer the arbitration") from None

    async def _answer_to(self, election: int | None) -> ServerStanding:
        """Return the server's answer; skip packets, and news from before a bid."""
        while True:
            message = await self._client.receive()
            if not message.HasField("arbitration"):
                continue
            standing = parse_standing(message.arbitration)
            is_newer = standing.highest is not None and standing.highest.number >= (election or 0)
            if election is None or standing.primary is Primary.THIS or is_newer:
                return standing

    def _open(self) -> None:
        """Raise `SwitchUnreachable` if the session is closed."""
        if self._client.channel is None:
            raise SwitchUnreachable(f"the session with {self._name} is closed")

    def _another_primary(self) -> AnotherPrimary:
        return AnotherPrimary(
            f"{self._name} (device {self.switch.device_id}) has another primary controller; "
            "one `checkmate run` serves all jobs of a switch, and another one waits with --standby"
        )

    def _translate_error(self, operation: str, error: P4ClientError) -> Exception:
        if error.code in GONE_CODES:
            return SwitchUnreachable(f"{self._name} went away during {operation}: {error.message}")
        if error.code == GRPCStatusCode.PERMISSION_DENIED:
            return self._another_primary()
        if error.code == GRPCStatusCode.UNIMPLEMENTED:
            return SwitchUnreachable(
                f"the server of {self._name} is not a P4Runtime server ({error.message}); "
                "a lab's switches can be reached only from the controller's namespace"
            )
        if error.message == NO_DEVICE or (error.code, operation) == (
            GRPCStatusCode.NOT_FOUND,
            "arbitration",
        ):
            number = self.switch.device_id
            remedy = "write the `device_id` that it has in the job's fabric"
            if self.switch.target in ("softswitch", "bmv2"):
                remedy = (
                    f"start it with --device-id {number}, or {remedy}. By default, it is device 0, in jobs 1"
                )
            return SwitchUnreachable(f"{self._name} has no device {number} ({error.message}): {remedy}")
        refusal = RefusalLost if (error.code, error.message) == _LOST_REFUSAL else WriteRefused
        return refusal(f"{self._name} refused {operation}: {error.code.name}: {error.message}")


def _credentials(tls: Tls | None) -> GRPCCredentialsTLS | None:
    if tls is None:
        return None
    for file in filter(None, (tls.ca, tls.cert, tls.key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise SwitchUnreachable(f"can't read the TLS file {file}: {error.strerror}") from None
    return GRPCCredentialsTLS(cacert=tls.ca, cert=tls.cert, private_key=tls.key)


def parse_standing(reply: p4r.MasterArbitrationUpdate) -> ServerStanding:
    """Return what a server's message says about its primary."""
    highest = (
        ElectionId.from_number(U128.decode(reply.election_id)) if reply.HasField("election_id") else None
    )
    return ServerStanding(_PRIMARY.get(P4RpcStatus.from_status(reply.status).code, Primary.ANOTHER), highest)
