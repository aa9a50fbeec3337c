"""The controller of one switch: installs what the jobs need, and serves the switch's stub endpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from checkmate.job.schema import Switch
from checkmate.output.log_lines import GatheredLog, StrangerLog
from checkmate.wording import counted
from controlplane import plan as planning
from controlplane.endpoint.closures import closures_line
from controlplane.endpoint.endpoint import Answer, Connected, View, answer
from controlplane.endpoint.frames import Segment, parse
from controlplane.endpoint.waiting import WaitingSegments
from controlplane.entities import Holdings, difference
from controlplane.errors import SwitchUnreachable, TooMuch, Unsure, WriteRefused
from controlplane.memory import Changes, SwitchMemory
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession
from controlplane.plan import SwitchPlan
from controlplane.tasks import until_first

LOG = logging.getLogger("checkmate")
RECONNECT_SECONDS = 0.5
ANSWERS_AT_ONCE = 256
IDLE_SECONDS = 0.0005
"""If no frame comes in this time, none that the switch has sent is waiting."""
DRAIN_SECONDS = 0.05
"""Longest time for reading frames before some are answered."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result of one reconciliation: updates written, entities held, seconds."""

    switch: str
    updates: int
    held: int
    seconds: float
    loaded: bool = False


class SwitchController:
    """Keeps one switch in the state that a network describes. All of it runs in one event loop."""

    def __init__(self, switch: Switch, network: Network, hello_keys: Mapping[str, bytes]) -> None:
        """Prepare a controller. `hello_keys`: the secret `hello.key` of each job; they may change."""
        self.switch = switch
        self._hello_keys = hello_keys
        self.codec = Codec.for_switch(switch)
        self.network = network
        self._memory: SwitchMemory | None = None
        self.plan = SwitchPlan(switch.name, Holdings(), {}, {})
        self.session: SwitchSession | None = None
        self._opened = AsyncExitStack()
        self._checked: tuple[Network, Holdings, SwitchPlan] | None = None
        self._view = View.of(network, switch.name, {}, Connected(), {}, hello_keys)
        self._queue = WaitingSegments()
        self._frames_read = 0
        self._waiting = asyncio.Event()
        self._writing = asyncio.Lock()
        self._lost = asyncio.Event()
        self._read = Holdings()
        self._loaded = False
        self._notes = StrangerLog()
        self._closures = {how: GatheredLog(logging.INFO, closures_line) for how in ("closed", "reset")}

    @property
    def held(self) -> Holdings | None:
        """What the switch should hold, as the controller remembers it; `None` before the first `write`."""
        return self._memory.held if self._memory is not None else None

    def check(self, network: Network) -> SwitchPlan:
        """Return the plan for `network`, checked against the switch's limits. Raises `TooMuch`."""
        held = self.held or Holdings()
        if self._checked is not None and self._checked[:2] == (network, held):
            return self._checked[2]
        plan = planning.plan_switch(network, self.switch.name, held)
        found = planning.excesses(plan, self.switch.target, planning.limits(self.switch.target))
        if found:
            raise TooMuch("\n".join(map(str, found)))
        self._checked = network, held.copy(), plan  # what is held changes as streams connect
        return plan

    async def open(self, *, replace: bool = False) -> None:
        """Open a session and read what the switch holds. Write nothing but a missing program."""
        self.check(self.network)
        async with AsyncExitStack() as opened:
            session = await opened.enter_async_context(SwitchSession(self.switch, self.codec))
            self._loaded = await session.ensure_pipeline(replace=replace)
            self._read = await session.read()
            self._opened = opened.pop_all()
        self.session = session

    async def write(self, progress: Callable[[int, int], None] | None = None) -> Reconciled:
        """Write the difference between what `open` read and what the jobs need.

        If the switch has lost its state, the controller writes back what it remembers, streams included.
        """
        start = time.monotonic()
        assert self.session is not None
        async with self._writing:
            network = self.network
            if self._memory is None:
                self._memory = SwitchMemory(self._read)
            plan = self.check(network)
            updates = difference(self._read, plan.holdings)
            done = 0

            def count(written: int) -> None:
                nonlocal done
                done += written
                if progress is not None:
                    progress(done, len(updates))

            await self.session.write(updates, count)
            self._adopt(network, plan)
        seconds = time.monotonic() - start
        return Reconciled(self.switch.name, len(updates), len(self._read), seconds, self._loaded)

    async def revert(self) -> None:
        """Undo what `write` wrote."""
        assert self.session is not None
        await self.session.write(difference(self.plan.holdings, self._read))

    async def connect(self, *, replace: bool = False) -> Reconciled:
        """Do `open` and `write`. Close the session if either fails."""
        await self.open(replace=replace)
        try:
            return await self.write()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the session. The switch keeps its entries."""
        for closures in self._closures.values():
            closures.flush()
        self.session = None
        await self._opened.aclose()

    async def apply(self, network: Network) -> Reconciled:
        """Change this switch to another set of jobs.

        A switch that is unreachable is reconciled when it returns.
        """
        start = time.monotonic()
        written = 0
        async with self._writing:
            plan = self.check(network)
            updates = difference(self.held or Holdings(), plan.holdings)
            if self.session is not None:
                try:
                    await self.session.write(updates)
                    written = len(updates)
                except SwitchUnreachable:
                    self._lost.set()
                except Unsure:
                    self._lost.set()
                    raise
            self._adopt(network, plan)
        return Reconciled(self.switch.name, written, len(plan.holdings), time.monotonic() - start)

    def _adopt(self, network: Network, plan: SwitchPlan) -> None:
        self.network, self.plan = network, plan
        ids = set(plan.boundary_ids.values())
        before = self._memory.accepted if self._memory is not None else {}
        accepted = {key: time for key, time in before.items() if key[0] in ids}
        self._memory = memory = SwitchMemory(plan.holdings.copy(), accepted)
        self._view = View.of(
            network,
            self.switch.name,
            plan.boundary_ids,
            memory.connected,
            memory.accepted,
            self._hello_keys,
        )

    @property
    def connected(self) -> Connected:
        """The streams that are connected now."""
        return self._view.connected

    async def serve(self) -> None:
        """Serve the stub endpoint. Reconnect and reconcile whenever the switch was away.

        Return never. Raise `AnotherPrimary`, or `WrongPipeline` if the switch returns with another program.
        """
        while True:
            try:
                if self.session is None:
                    done = await self.connect()
                    LOG.warning(
                        "switch %s is back: %s written", self.switch.name, counted(done.updates, "update")
                    )
                assert self.session is not None
                await self._serve_session(self.session)
            except (SwitchUnreachable, WriteRefused) as gone:
                if self.session is not None or isinstance(gone, WriteRefused):
                    LOG.warning("%s; trying again until it is back", gone)
                await self.close()
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _serve_session(self, session: SwitchSession) -> None:
        self._lost.clear()
        await until_first(
            self._answer_queued(session), self._fill_queue(session), session.heartbeat(), self._lost.wait()
        )
        raise SwitchUnreachable(f"switch {self.switch.name} must be read again")

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
                await self._drained()
                batch = self._queue.take(ANSWERS_AT_ONCE)
                async with self._writing:
                    try:
                        await self._answer(session, batch)
                    except WriteRefused:
                        for one in batch if len(batch) > 1 else ():
                            with suppress(WriteRefused):
                                await self._answer(session, [one])
            self._waiting.clear()

    async def _drained(self) -> None:
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
            found = answer(segment, port, self._view, now)
            memory.take(found, changes)
            answers.append((port, found))
        updates = changes.updates
        try:
            if updates:
                await session.write(updates)
        except (WriteRefused, SwitchUnreachable) as error:
            memory.forget(changes)
            if isinstance(error, Unsure):
                self._lost.set()
            LOG.warning("%s", error)
            raise
        for port, found in answers:
            if found.note:
                self._notes.line(f"switch {self.switch.name}: {found.note}")
            if found.closure is not None:
                self._closures[found.closure.how].add(found.closure)
            if found.frame is not None:
                await session.send_packet(port, found.frame)
