"""One switch and its entities: read, write the difference, remember, and follow the jobs as they change."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from checkmate.job.schema import Switch
from controlplane import forwarding
from controlplane import plan as planning
from controlplane.election import Candidacy
from controlplane.endpoint.endpoint import Answer, ConnectedStreams, View
from controlplane.entities import Entity, EntryKey, Holdings, TableEntry, Update, difference
from controlplane.errors import ControlError, SwitchUnreachable, TooMuch, Unsure, WriteRefused
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession
from controlplane.p4runtime.vacating import VacatedState, resume, vacate
from controlplane.plan import SwitchPlan
from controlplane.streams import StreamKey

_log = logging.getLogger("checkmate")
ROUNDS = 5
"""Reads that may show a difference from what was written."""


@dataclass
class Changes:
    """Changes by answers in the memory that are not yet on the switch."""

    by_entry: dict[EntryKey, Update] = field(default_factory=dict)
    earlier_hello_times: dict[StreamKey, int | None] = field(default_factory=dict)
    """The times that were replaced."""

    @property
    def updates(self) -> list[Update]:
        """The updates that the switch lacks: additions before removals."""
        updates = [update for update in self.by_entry.values() if update.old != update.new]
        return sorted(updates, key=lambda update: update.new is None)


class SwitchMemory:
    """The entries of a switch: changed before the switch is, and changed back if the switch refuses.

    `hello_times` has the time of each stream's last hello.
    """

    def __init__(self, holdings: Holdings, hello_times: Mapping[StreamKey, int] | None = None) -> None:
        self.holdings = holdings
        self.connected = ConnectedStreams(holdings.table("streams"))
        self.hello_times = dict(hello_times or {})

    def take(self, reply: Answer, changes: Changes) -> None:
        """Apply an answer's changes, and add them to those that are still to be written."""
        admission = reply.admission
        drops = [*(admission.drops if admission else ()), *([reply.drop] if reply.drop else ())]
        for entry in drops:
            self._change(entry.key, None, changes.by_entry)
        if admission is not None:
            for entry in admission.puts:
                self._change(entry.key, entry, changes.by_entry)
            changes.earlier_hello_times.setdefault(admission.key, self.hello_times.get(admission.key))
            self.hello_times[admission.key] = admission.time

    def forget(self, changes: Changes) -> None:
        """Undo changes that the switch refused."""
        for update in changes.updates:
            self._set(update.new, update.old)
        for key, hello_time in changes.earlier_hello_times.items():
            if hello_time is None:
                del self.hello_times[key]
            else:
                self.hello_times[key] = hello_time

    def _change(self, key: EntryKey, new: Entity | None, changes: dict[EntryKey, Update]) -> None:
        old = self.holdings.entries.get(key)
        first = changes[key].old if key in changes else old
        changes[key] = Update(first, new)
        self._set(old, new)

    def _set(self, old: Entity | None, new: Entity | None) -> None:
        if new is not None:
            self.holdings.put(new)
        elif old is not None:
            self.holdings.drop(old)
        for entity, change in ((old, self.connected.drop), (new, self.connected.put)):
            if isinstance(entity, TableEntry) and entity.table == "streams":
                change(entity)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The result of one reconciliation: updates written, entities held, seconds."""

    switch: str
    updates: int
    entities: int
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
            network: The jobs that it serves.
            hello_keys: The secret `hello.key` of each job; they may change.
            candidacy: Called at each connect; returns the claim to the switch.
        """
        self.switch = switch
        self._hello_keys = hello_keys
        self._candidacy = candidacy
        self.codec = Codec.for_switch(switch)
        self.network = network
        self._memory: SwitchMemory | None = None
        self.plan = SwitchPlan(switch.name, Holdings(), {}, {})
        self.session: SwitchSession | None = None
        self._exit_stack = AsyncExitStack()
        self._last_check: tuple[Network, Holdings, SwitchPlan] | None = None
        self._view = View.from_network(network, switch.name, {}, ConnectedStreams(), {}, hello_keys)
        self._writing = asyncio.Lock()
        self._must_reconnect = asyncio.Event()
        self._initial_holdings = Holdings()
        self._loaded = False
        self._restoring = False
        self.vacated: VacatedState | None = None
        """The state that `open` has stopped, to replace the program."""
        self.term = 0
        """The term of its last election id; 0 before the first."""
        self.write_errors: Counter[str] = Counter()
        """Writes that failed, by error."""
        self.reconciled = 0
        self.reconcile_seconds = 0.0

    @property
    def holdings(self) -> Holdings | None:
        """The entities that the switch should hold, as remembered; `None` before the first `write`."""
        return self._memory.holdings if self._memory is not None else None

    def check(self, network: Network) -> SwitchPlan:
        """Return the plan for `network`, checked against the switch's limits. Raises `TooMuch`."""
        holdings = self.holdings or Holdings()
        if self._last_check is not None and self._last_check[:2] == (network, holdings):
            return self._last_check[2]
        plan = planning.plan_switch(network, self.switch.name, holdings)
        excesses = planning.excesses(plan, self.switch.target, planning.limits(self.switch.target))
        if excesses:
            raise TooMuch("\n".join(map(str, excesses)))
        self._last_check = network, holdings.copy(), plan  # what is held changes as streams connect
        return plan

    async def open(self, *, replace: bool = False) -> None:
        """Open a session and read what the switch holds. Write nothing but a missing program.

        With `replace`, stop training there instead; `load` is to follow, or `resume`.
        """
        self.check(self.network)
        if replace:
            self.codec.pipeline_config()  # raises without the compiler's output, before anything stops
        async with AsyncExitStack() as stack:
            session = SwitchSession(self.switch, self.codec, candidacy=self._candidacy())
            await stack.enter_async_context(session)
            if replace:
                self.vacated = await vacate(session, forwarding.shadow_macs(self.network))
            else:
                self._loaded = await session.ensure_pipeline()
                self._initial_holdings = await session.read()
            self._exit_stack = stack.pop_all()
        if (
            session.earlier_election is not None
            and session.earlier_election.term > self.term
            and self._memory is not None
        ):
            # Another controller has served meanwhile: what this one remembers is old.
            self._memory, self._restoring = None, False
        self.session, self.term = session, session.term

    async def load(self) -> None:
        """Replace the program. The new one gets the connected streams of the old one, if it can have them."""
        assert self.session is not None
        if self.vacated is not None:
            self._memory = SwitchMemory(self.vacated.holdings.copy())
            try:
                for entity in self.check(self.network).holdings:
                    self.codec.encode(entity)
            except (LookupError, ValueError) as error:
                _log.warning(
                    "switch %s: its streams end: the program has changed: %s", self.switch.name, error
                )
                self._memory = None
        self._loaded = await self.session.ensure_pipeline(replace=True)
        self._initial_holdings = await self.session.read()

    async def resume(self) -> None:
        """Have a switch whose program should have been replaced forward again, as far as it can."""
        vacated, session = self.vacated, self.session
        if vacated is None or session is None or self.reconciled:
            return
        try:
            if self._loaded:
                await session.write(difference(await session.read(), vacated.holdings))
            else:
                await resume(session, vacated, self.check(self.network).holdings)
        except (ControlError, LookupError, ValueError) as error:
            _log.error("switch %s may not forward: start a controller for it; %s", self.switch.name, error)

    async def write(self, progress: Callable[[int, int], None] | None = None) -> Reconciliation:
        """Write the difference between what `open` read and what the jobs need, until a read shows none.

        A controller that was killed may have left a batch that the switch still applies. If the switch has
        lost its state, the controller writes back what it remembers, streams included.

        Raises:
            Unsure: The switch still differs: something else writes to it.
        """
        start = time.monotonic()
        assert self.session is not None
        update_count = 0
        async with self._writing:
            network, read = self.network, self._initial_holdings
            for _ in range(ROUNDS):
                self._remember(read)
                plan = self.check(network)
                updates = difference(read, plan.holdings)
                if not updates:
                    break
                progress_count, total = update_count, update_count + len(updates)

                def count(more: int, total: int = total) -> None:
                    nonlocal progress_count
                    progress_count += more
                    if progress is not None:
                        progress(progress_count, total)

                refusal = await self._try(updates, count)
                before, read = read, await self.session.read()
                if refusal is None:
                    update_count = total
                elif read == before:
                    raise refusal  # nothing that has come late is the reason
            else:
                raise Unsure(f"switch {self.switch.name} differs from what was written to it {ROUNDS} times")
            self._restoring = False
            self._adopt(network, plan)
        seconds = time.monotonic() - start
        self.reconciled += 1
        self.reconcile_seconds += seconds
        return Reconciliation(
            self.switch.name, update_count, len(self._initial_holdings), seconds, self._loaded
        )

    async def _try(self, updates: Sequence[Update], count: Callable[[int], None]) -> WriteRefused | None:
        """Write; return a refusal that was undone."""
        try:
            await self._put(updates, count)
        except Unsure:
            raise
        except WriteRefused as refusal:
            return refusal
        return None

    async def _put(self, updates: Sequence[Update], count: Callable[[int], None] | None = None) -> None:
        """Write updates; count failures."""
        assert self.session is not None
        try:
            await self.session.write(updates, count)
        except ControlError as error:
            self.write_errors[type(error).__name__] += 1
            raise

    def _remember(self, read: Holdings) -> None:
        """Take the connected streams from the switch, because another controller may have connected some.

        A switch that has lost its state gets back those that this controller remembers.
        """
        before = self._memory
        if before is not None and not read.entries:
            self._restoring = True
        if before is None or not self._restoring:
            self._memory = SwitchMemory(read.copy(), before.hello_times if before is not None else None)

    async def revert(self) -> None:
        """Undo what `write` wrote."""
        assert self.session is not None
        await self.session.write(difference(self.plan.holdings, self._initial_holdings))

    async def connect(self) -> Reconciliation:
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
        await self._exit_stack.aclose()

    async def apply(self, network: Network) -> Reconciliation:
        """Change this switch to another set of jobs.

        A switch that is unreachable is reconciled when it returns.
        """
        start = time.monotonic()
        update_count = 0
        async with self._writing:
            plan = self.check(network)
            updates = difference(self.holdings or Holdings(), plan.holdings)
            if self.session is not None:
                try:
                    await self._put(updates)
                    update_count = len(updates)
                except SwitchUnreachable:
                    self._must_reconnect.set()
                except Unsure:
                    self._must_reconnect.set()
                    raise
            self._adopt(network, plan)
        return Reconciliation(self.switch.name, update_count, len(plan.holdings), time.monotonic() - start)

    async def restore(self, network: Network) -> None:
        """Change this switch back to an earlier set of jobs. One that refuses is read and written again."""
        try:
            await self.apply(network)
        except ControlError as error:
            _log.error("switch %s: going back to the jobs before: %s", self.switch.name, error)
            self.network = network
            self._must_reconnect.set()

    async def renew(self) -> None:
        """Have the switch's primary, which is this controller, stand for the job files as they are now."""
        async with self._writing:
            if self.session is not None:
                try:
                    await self.session.renew(self._candidacy())
                    self.term = self.session.term
                except SwitchUnreachable:
                    self._must_reconnect.set()

    def _adopt(self, network: Network, plan: SwitchPlan) -> None:
        self.network, self.plan = network, plan
        ids = set(plan.boundary_ids.values())
        before = self._memory.hello_times if self._memory is not None else {}
        hello_times = {key: time for key, time in before.items() if key[0] in ids}
        self._memory = memory = SwitchMemory(plan.holdings.copy(), hello_times)
        self._view = View.from_network(
            network,
            self.switch.name,
            plan.boundary_ids,
            memory.connected,
            memory.hello_times,
            self._hello_keys,
        )

    @property
    def connected(self) -> ConnectedStreams:
        """The streams that are connected now."""
        return self._view.connected
