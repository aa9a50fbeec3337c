"""One switch and what it should hold: read, write the difference, and follow the jobs as they change."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from checkmate.job.schema import Switch
from controlplane import forwarding
from controlplane import plan as planning
from controlplane.election import Candidacy
from controlplane.endpoint.endpoint import Connected, View
from controlplane.entities import Holdings, Update, difference
from controlplane.errors import ControlError, SwitchUnreachable, TooMuch, Unsure, WriteRefused
from controlplane.memory import SwitchMemory
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession
from controlplane.p4runtime.vacating import Vacated, resume, vacate
from controlplane.plan import SwitchPlan

_log = logging.getLogger("checkmate")

ROUNDS = 5
"""Reads that may show a difference from what was written."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result of one reconciliation: updates written, entities held, seconds."""

    switch: str
    updates: int
    held: int
    seconds: float
    loaded: bool = False


class ReconciledSwitch:
    """A switch, its entries, and the state that a network describes. All of it runs in one event loop."""

    def __init__(
        self,
        switch: Switch,
        network: Network,
        hello_keys: Mapping[str, bytes],
        candidacy: Callable[[], Candidacy],
    ) -> None:
        """Prepare a controller.

        Args:
            switch: The switch.
            network: What it should do.
            hello_keys: The secret `hello.key` of each job; they may change.
            candidacy: Called at each connect, for what to claim the switch with.
        """
        self.switch = switch
        self._hello_keys = hello_keys
        self._candidacy = candidacy
        self.codec = Codec.for_switch(switch)
        self.network = network
        self._memory: SwitchMemory | None = None
        self.plan = SwitchPlan(switch.name, Holdings(), {}, {})
        self.session: SwitchSession | None = None
        self._opened = AsyncExitStack()
        self._checked: tuple[Network, Holdings, SwitchPlan] | None = None
        self._view = View.of(network, switch.name, {}, Connected(), {}, hello_keys)
        self._writing = asyncio.Lock()
        self._lost = asyncio.Event()
        self._found = Holdings()
        self._loaded = False
        self._restoring = False
        self.vacated: Vacated | None = None
        """What `open` has stopped, to replace the program."""
        self.term = 0
        """Of its last election id; 0 before the first."""
        self.refused: Counter[str] = Counter()
        """Writes that failed, by error."""
        self.reconciled = 0
        self.reconcile_seconds = 0.0

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
        """Open a session and read what the switch holds. Write nothing but a missing program.

        With `replace`, stop training there instead; `load` is to follow, or `resume`.
        """
        self.check(self.network)
        if replace:
            self.codec.pipeline_config()  # raises without the compiler's output, before anything stops
        async with AsyncExitStack() as opened:
            session = SwitchSession(self.switch, self.codec, candidacy=self._candidacy())
            await opened.enter_async_context(session)
            if replace:
                self.vacated = await vacate(session, forwarding.shadow_macs(self.network))
            else:
                self._loaded = await session.ensure_pipeline()
                self._found = await session.read()
            self._opened = opened.pop_all()
        if session.found is not None and session.found.term > self.term and self._memory is not None:
            # Another controller has served meanwhile: what this one remembers is old.
            self._memory, self._restoring = None, False
        self.session, self.term = session, session.term

    async def load(self) -> None:
        """Replace the program. The new one gets the connected streams of the old one, if it can have them."""
        assert self.session is not None
        if self.vacated is not None:
            self._memory = SwitchMemory(self.vacated.held.copy())
            try:
                for entity in self.check(self.network).holdings:
                    self.codec.encode(entity)
            except (LookupError, ValueError) as error:
                _log.warning(
                    "switch %s: its streams end: the program has changed: %s", self.switch.name, error
                )
                self._memory = None
        self._loaded = await self.session.ensure_pipeline(replace=True)
        self._found = await self.session.read()

    async def resume(self) -> None:
        """Have a switch whose program should have been replaced forward again, as far as it can."""
        vacated, session = self.vacated, self.session
        if vacated is None or session is None or self.reconciled:
            return
        try:
            if self._loaded:
                await session.write(difference(await session.read(), vacated.held))
            else:
                await resume(session, vacated, self.check(self.network).holdings)
        except (ControlError, LookupError, ValueError) as error:
            _log.error("switch %s may not forward: start a controller for it; %s", self.switch.name, error)

    async def write(self, progress: Callable[[int, int], None] | None = None) -> Reconciled:
        """Write the difference between what `open` read and what the jobs need, until a read shows none.

        A controller that was killed may have left a batch that the switch still applies. If the switch has
        lost its state, the controller writes back what it remembers, streams included.

        Raises:
            Unsure: The switch still differs: something else writes to it.
        """
        start = time.monotonic()
        assert self.session is not None
        written = 0
        async with self._writing:
            network, read = self.network, self._found
            for _ in range(ROUNDS):
                self._remember(read)
                plan = self.check(network)
                updates = difference(read, plan.holdings)
                if not updates:
                    break
                done, total = written, written + len(updates)

                def count(more: int, total: int = total) -> None:
                    nonlocal done
                    done += more
                    if progress is not None:
                        progress(done, total)

                refused = await self._try(updates, count)
                before, read = read, await self.session.read()
                if refused is None:
                    written = total
                elif read == before:
                    raise refused  # nothing that has come late is the reason
            else:
                raise Unsure(f"switch {self.switch.name} differs from what was written to it {ROUNDS} times")
            self._restoring = False
            self._adopt(network, plan)
        seconds = time.monotonic() - start
        self.reconciled += 1
        self.reconcile_seconds += seconds
        return Reconciled(self.switch.name, written, len(self._found), seconds, self._loaded)

    async def _try(self, updates: Sequence[Update], count: Callable[[int], None]) -> WriteRefused | None:
        """Write; return a refusal that was undone."""
        try:
            await self._put(updates, count)
        except Unsure:
            raise
        except WriteRefused as refused:
            return refused
        return None

    async def _put(self, updates: Sequence[Update], count: Callable[[int], None] | None = None) -> None:
        """Write updates; count failures."""
        assert self.session is not None
        try:
            await self.session.write(updates, count)
        except ControlError as error:
            self.refused[type(error).__name__] += 1
            raise

    def _remember(self, read: Holdings) -> None:
        """Take the connected streams from the switch, because another controller may have connected some.

        A switch that has lost its state gets back those that this controller remembers.
        """
        before = self._memory
        if before is not None and not read.entries:
            self._restoring = True
        if before is None or not self._restoring:
            self._memory = SwitchMemory(read.copy(), before.accepted if before is not None else None)

    async def revert(self) -> None:
        """Undo what `write` wrote."""
        assert self.session is not None
        await self.session.write(difference(self.plan.holdings, self._found))

    async def connect(self) -> Reconciled:
        """Do `open` and `write`. Close the session if either fails."""
        await self.open()
        try:
            return await self.write()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the session. The switch keeps its entries."""
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
                    await self._put(updates)
                    written = len(updates)
                except SwitchUnreachable:
                    self._lost.set()
                except Unsure:
                    self._lost.set()
                    raise
            self._adopt(network, plan)
        return Reconciled(self.switch.name, written, len(plan.holdings), time.monotonic() - start)

    async def renew(self) -> None:
        """Have the switch's primary, which is this controller, stand for the job files as they are now."""
        async with self._writing:
            if self.session is not None:
                try:
                    await self.session.renew(self._candidacy())
                    self.term = self.session.term
                except SwitchUnreachable:
                    self._lost.set()

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
