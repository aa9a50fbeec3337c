"""A controller writes until the switch is as it should be, and removes no stream that is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Any, Self

import pytest

from controlplane.election import Candidacy, ElectionId
from controlplane.entities import Holdings, TableEntry, Update, difference
from controlplane.errors import Unsure, WriteRefused
from controlplane.network import Network
from controlplane.plan import plan_switch
from controlplane.reconciling import ROUNDS, ReconciledSwitch
from controlplane.streams import StreamConnection, expect, rewrite
from testbed.jobs import job

NETWORK = Network([job()])
PLAN = plan_switch(NETWORK, "tor0", Holdings())
KEY, STREAM = next((key, stream) for key, stream in PLAN.streams.items())


def connected(incarnation: int, port: int = 5000) -> list[TableEntry]:
    """Return the entries of a connected stream."""
    end = StreamConnection(IPv4Address(STREAM.nic.ip), STREAM.nic.mac, port, 77)
    stub = NETWORK.switches["tor0"].stub
    return [rewrite(KEY, incarnation, end, stub), expect(KEY[0], incarnation)]


class FakeSession:
    """A switch's entries, which another program may change after each write."""

    def __init__(self, held: Holdings, meanwhile: Callable[[Holdings, int], None]) -> None:
        self.held, self._meanwhile = held, meanwhile
        self.writes: list[list[Update]] = []
        self.earlier_election: ElectionId | None = None
        self.term = 1
        self.late: list[TableEntry] = []
        """Entries that come between the first read and the first write."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def ensure_pipeline(self, *, replace: bool = False) -> bool:
        return replace

    async def renew(self, _: Candidacy) -> None:
        self.term += 1

    async def read(self) -> Holdings:
        return self.held.copy()

    async def write(self, updates: list[Update], progress: Callable[[int], None] | None = None) -> None:
        self.writes.append(updates)
        for entry in self.late:
            self.held.put(entry)
        self.late.clear()
        there = {entity.key for entity in self.held}
        if any(update.old is None and update.entity.key in there for update in updates):
            raise WriteRefused("an entry is there already; what was applied before it is undone")
        for update in updates:
            self.held.drop(update.entity) if update.new is None else self.held.put(update.new)
        self._meanwhile(self.held, len(self.writes))


def nothing(held: Holdings, writes: int) -> None:
    """Change nothing."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ReconciledSwitch, FakeSession]]:
    def make(
        held: Holdings, meanwhile: Callable[[Holdings, int], None] = nothing
    ) -> tuple[ReconciledSwitch, FakeSession]:
        session = FakeSession(held, meanwhile)

        def connect(*_: Any, **__: Any) -> FakeSession:
            return session

        monkeypatch.setattr("controlplane.reconciling.SwitchSession", connect)
        made = ReconciledSwitch(NETWORK.switches["tor0"], NETWORK, {}, lambda: Candidacy(1))
        return made, session

    return make


def test_a_batch_of_a_controller_that_has_ended_may_come_late(opened: Any) -> None:
    late = connected(7)

    def apply_late(held: Holdings, writes: int) -> None:
        if writes == 1:
            held.drop(next(iter(PLAN.holdings)))
            for entry in late:
                held.put(entry)

    controller, switch = opened(Holdings(), apply_late)
    done = asyncio.run(controller.connect())
    assert done.updates == len(PLAN.holdings) + 1, "what it has undone is written again"
    assert all(entry in list(switch.held) for entry in late), "its stream stays"
    assert list(controller.connected.by_stream.values()) == [late[0]]
    assert not difference(switch.held, controller.plan.holdings)


def test_an_entry_that_came_late_is_not_inserted_again(opened: Any) -> None:
    controller, switch = opened(Holdings())
    switch.late += [one for one in PLAN.holdings.entries.values() if one.table == "forwarding"][:1]
    asyncio.run(controller.connect())
    assert len(switch.writes) == 2
    assert not difference(switch.held, controller.plan.holdings)
    assert controller.write_errors == {"WriteRefused": 1}


def test_a_refusal_that_a_second_read_does_not_explain_is_told(opened: Any) -> None:
    controller, switch = opened(Holdings())

    async def refuse(*_: object) -> None:
        raise WriteRefused("the table is full")

    switch.write = refuse
    with pytest.raises(WriteRefused, match="the table is full"):
        asyncio.run(controller.connect())


def test_what_a_controller_remembers_is_old_once_another_one_has_served(opened: Any) -> None:
    controller, switch = opened(Holdings.from_entities([*PLAN.holdings, *connected(8)]))
    asyncio.run(controller.connect())
    switch.held = Holdings()  # by the other one's jobs
    switch.earlier_election = ElectionId(2, 0xA, 5)
    asyncio.run(controller.connect())
    assert not set(connected(8)) & set(switch.held.entries.values())


def test_its_own_renewed_id_is_not_another_controllers(opened: Any) -> None:
    controller, switch = opened(Holdings.from_entities([*PLAN.holdings, *connected(8)]))

    async def scenario() -> None:
        await controller.connect()
        await controller.renew()
        switch.held, switch.earlier_election = Holdings(), ElectionId(switch.term, 0xA, 1)
        await controller.connect()

    asyncio.run(scenario())
    assert set(connected(8)) <= set(switch.held.entries.values()), "it still knows its streams"


def test_a_switch_that_never_is_as_it_should_be_is_an_error(opened: Any) -> None:
    controller, switch = opened(Holdings(), lambda held, _: held.drop(next(iter(held))))
    with pytest.raises(Unsure, match=f"switch tor0 differs .* {ROUNDS} times"):
        asyncio.run(controller.connect())
    assert len(switch.writes) == ROUNDS


def test_streams_that_another_controller_has_connected_stay(opened: Any) -> None:
    controller, switch = opened(Holdings())
    asyncio.run(controller.connect())
    for entry in connected(8):
        switch.held.put(entry)
    again = asyncio.run(controller.connect())
    assert again.updates == 0
    assert list(controller.connected.by_stream.values()) == connected(8)[:1]


def test_a_switch_that_has_lost_everything_gets_its_streams_back(opened: Any) -> None:
    controller, switch = opened(Holdings.from_entities([*PLAN.holdings, *connected(8)]))
    asyncio.run(controller.connect())
    switch.held = Holdings()
    asyncio.run(controller.connect())
    assert set(connected(8)) <= set(switch.held.entries.values())
