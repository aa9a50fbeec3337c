"""The controller of one switch: installs what the jobs need, and serves the switch's stub endpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address

from checkmate.base.wording import counted
from checkmate.events.kinds import (
    STREAM_ADMITTED,
    STREAM_CLOSED,
    STREAM_REFUSED,
    SWITCH_BACK,
    SWITCH_LOST,
    Occurrence,
)
from checkmate.events.process_log import say
from checkmate.job.schema import Switch
from checkmate.output.log_lines import GatheredLog, StrangerLog
from controlplane.election import Candidacy
from controlplane.endpoint.endpoint import Answer, Closure, answer, closures_line
from controlplane.endpoint.frames import Segment, parse
from controlplane.endpoint.waiting import WaitingSegments
from controlplane.errors import SwitchUnreachable, Unsure, WriteRefused
from controlplane.network import Network
from controlplane.p4runtime.session import SwitchSession
from controlplane.reconciling import Changes, ReconciledSwitch
from controlplane.tasks import until_first

LOG = logging.getLogger("checkmate")
RECONNECT_SECONDS = 0.5
ANSWERS_AT_ONCE = 256
IDLE_SECONDS = 0.0005
"""Time without a frame after which none that the switch has sent is waiting."""
SILENCE_SECONDS = 60.0
DRAIN_SECONDS = 0.05
"""Longest time for reading frames before some are answered."""


class SwitchController(ReconciledSwitch):
    """Keeps one switch in line with the jobs, and serves its stub endpoint."""

    def __init__(
        self,
        switch: Switch,
        network: Network,
        hello_keys: Mapping[str, bytes],
        candidacy: Callable[[], Candidacy],
    ) -> None:
        super().__init__(switch, network, hello_keys, candidacy)
        self._queue = WaitingSegments()
        self._frames_read = 0
        self._waiting = asyncio.Event()
        self._notes = StrangerLog()
        self._closures = {
            how: GatheredLog(logging.INFO, closures_line, _closure_event) for how in ("closed", "reset")
        }
        self._admissions = GatheredLog[str](logging.DEBUG, self._admissions_line, self._admission_event)

    async def close(self) -> None:
        """End the session. The switch keeps its entries."""
        for closures in self._closures.values():
            closures.flush()
        self._admissions.flush()
        await super().close()

    async def serve(self) -> None:
        """Serve the stub endpoint. Reconnect and reconcile whenever the switch was away.

        Return never. Raise `AnotherPrimary`, or `WrongPipeline` if the switch returns with another program.
        """
        while True:
            try:
                if self.session is None:
                    report = await self.connect()
                    name, updates = self.switch.name, report.updates
                    return_event = SWITCH_BACK(switch=name, updates=updates)
                    say(
                        logging.WARNING,
                        return_event,
                        "switch %s is back: %s written",
                        name,
                        counted(updates, "update"),
                    )
                assert self.session is not None
                await self._serve_session(self.session)
            except (SwitchUnreachable, WriteRefused) as error:
                if self.session is not None or isinstance(error, WriteRefused):
                    event = SWITCH_LOST(switch=self.switch.name, why=str(error))
                    say(logging.WARNING, event, "%s; trying again until it is back", error)
                await self.close()
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _serve_session(self, session: SwitchSession) -> None:
        self._must_reconnect.clear()
        await until_first(
            self._answer_queued(session),
            self._fill_queue(session),
            session.heartbeat(),
            self._must_reconnect.wait(),
            self._name_silence(),
        )
        raise SwitchUnreachable(f"switch {self.switch.name} must be read again")

    async def _name_silence(self) -> None:
        """Warn of a switch that sends its controller nothing for its jobs: once for each set of jobs."""
        judged: Network | None = None
        while True:
            network, before = self.network, self._frames_read
            await asyncio.sleep(SILENCE_SECONDS)
            if network is not self.network or network is judged:
                continue
            connected = self.holdings is not None and any(True for _ in self.holdings.table("streams"))
            copies = any(boundary.switch == self.switch.name for boundary in network.boundaries)
            if copies and not connected and self._frames_read == before:
                LOG.warning("%s", silence(self.switch))
            judged = network

    async def _fill_queue(self, session: SwitchSession) -> None:
        async for port, frame in session.packets():
            self._frames_read += 1
            segment = parse(frame)
            if segment is not None:
                self._queue.put(segment, port, self._view, time.monotonic())
                self._waiting.set()

    async def _answer_queued(self, session: SwitchSession) -> None:
        while True:
            await self._waiting.wait()
            while self._queue:
                await self._drain()
                batch = self._queue.take(ANSWERS_AT_ONCE)
                async with self._writing:
                    try:
                        await self._answer(session, batch)
                    except WriteRefused:
                        for arrival in batch if len(batch) > 1 else ():
                            with suppress(WriteRefused):
                                await self._answer(session, [arrival])
            self._waiting.clear()

    async def _drain(self) -> None:
        """Read the frames that the switch has sent, so that known NICs' are answered before a flood."""
        deadline = time.monotonic() + DRAIN_SECONDS
        before = -1
        while self._frames_read != before and time.monotonic() < deadline:
            before = self._frames_read
            await asyncio.sleep(IDLE_SECONDS)

    async def _answer(self, session: SwitchSession, batch: Sequence[tuple[Segment, int]]) -> None:
        """Answer segments in order. Send the frames after all changes are on the switch."""
        assert self._memory is not None
        memory = self._memory
        changes = Changes()
        now = time.time_ns() // 1000
        answers: list[tuple[int, Answer]] = []
        for segment, port in batch:
            reply = answer(segment, port, self._view, now)
            memory.take(reply, changes)
            answers.append((port, reply))
        updates = changes.updates
        try:
            if updates:
                await self._put(updates)
        except (WriteRefused, SwitchUnreachable) as error:
            memory.forget(changes)
            if isinstance(error, Unsure):
                self._must_reconnect.set()
            LOG.warning("%s", error)
            raise
        for port, reply in answers:
            if reply.note:
                self._notes.line(f"switch {self.switch.name}: {reply.note}", self._refusal_event)
            if reply.admission is not None:
                self._admissions.add(str(IPv4Address(reply.admission.puts[0]["shadow_ip"])))
            if reply.closure is not None:
                self._closures[reply.closure.how].add(reply.closure)
            if reply.frame is not None:
                await session.send_packet(port, reply.frame)

    def _refusal_event(self, words: str, count: int) -> Occurrence:
        return STREAM_REFUSED(switch=self.switch.name, count=count, why=words)

    def _admission_event(self, nics: Sequence[str]) -> Occurrence:
        return STREAM_ADMITTED(switch=self.switch.name, count=len(nics), nics=list(dict.fromkeys(nics)))

    def _admissions_line(self, nics: Sequence[str]) -> str:
        return f"switch {self.switch.name}: {counted(len(nics), 'stream is', 'streams are')} admitted"


def _closure_event(closures: Sequence[Closure]) -> Occurrence:
    first, nics = closures[0], list(dict.fromkeys(closure.nic for closure in closures))
    return STREAM_CLOSED(switch=first.switch, how=first.how, count=len(closures), nics=nics)


def silence(switch: Switch) -> str:
    """Return a warning of a switch from which no packet has come, with what may be wrong."""
    words = (
        f"switch {switch.name}: no packet of a shadow NIC has come in {SILENCE_SECONDS:g} s: do shadow nodes "
        "run, and is each at the port that the job file says?"
    )
    if switch.target == "bmv2":
        words += f" BMv2 must have been started with --cpu-port {switch.packet_port}, or it sends none."
    return words
