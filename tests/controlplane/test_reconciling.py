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

    def __init__(self, holdings: Holdings, meanwhile: Callable[[Holdings, int], None]) -> None:
        self.holdings, self._meanwhile = holdings, meanwhile
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
        return self.holdings.copy()

    async def write(self, updates: list[Update], progress: Callable[[int], None] | None = None) -> None:
        self.writes.append(updates)
        for entry in self.late:
            self.holdings.put(entry)
        self.late.clear()
        there = {entity.key for entity in self.holdings}
        if any(update.old is None and update.entity.key in there for update in updates):
            raise WriteRefused("an entry is there already; what was applied before it is undone")
        for update in updates:
            self.holdings.drop(update.entity) if update.new is None else self.holdings.put(update.new)
        self._meanwhile(self.holdings, len(self.writes))


def nothing(holdings: Holdings, writes: int) -> None:
    """Change nothing."""


@pytest.fixture
def open_switch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ReconciledSwitch, FakeSession]]:
    def make(
        holdings: Holdings, meanwhile: Callable[[Holdings, int], None] = nothing
    ) -> tuple[ReconciledSwitch, FakeSession]:
        session = FakeSession(holdings, meanwhile)

        def connect(*_: Any, **__: Any) -> FakeSession:
            return session

        monkeypatch.setattr("controlplane.reconciling.SwitchSession", connect)
        switch = ReconciledSwitch(NETWORK.switches["tor0"], NETWORK, {}, lambda: Candidacy(1))
        return switch, session

    return make


def test_a_batch_of_a_controller_that_has_ended_may_come_late(open_switch: Any) -> None:
    late = connected(7)

    def apply_late(holdings: Holdings, writes: int) -> None:
        if writes == 1:
            holdings.drop(next(iter(PLAN.holdings)))
            for entry in late:
                holdings.put(entry)

    controller, switch = open_switch(Holdings(), apply_late)
    report = asyncio.run(controller.connect())
    assert report.updates == len(PLAN.holdings) + 1, "what it has undone is written again"
    assert all(entry in list(switch.holdings) for entry in late), "its stream stays"
    assert list(controller.connected.by_stream.values()) == [late[0]]
    assert not difference(switch.holdings, controller.plan.holdings)


def test_an_entry_that_came_late_is_not_inserted_again(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings())
    switch.late += [entry for entry in PLAN.holdings.entries.values() if entry.table == "forwarding"][:1]
    asyncio.run(controller.connect())
    assert len(switch.writes) == 2
    assert not difference(switch.holdings, controller.plan.holdings)
    assert controller.write_errors == {"WriteRefused": 1}


def test_a_refusal_that_a_second_read_does_not_explain_is_told(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings())

    async def refuse(*_: object) -> None:
        raise WriteRefused("the table is full")

    switch.write = refuse
    with pytest.raises(WriteRefused, match="the table is full"):
        asyncio.run(controller.connect())


def test_what_a_controller_remembers_is_old_once_another_one_has_served(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings.from_entities([*PLAN.holdings, *connected(8)]))
    asyncio.run(controller.connect())
    switch.holdings = Holdings()  # by the other one's jobs
    switch.earlier_election = ElectionId(2, 0xA, 5)
    asyncio.run(controller.connect())
    assert not set(connected(8)) & set(switch.holdings.entries.values())


def test_its_own_renewed_id_is_not_another_controllers(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings.from_entities([*PLAN.holdings, *connected(8)]))

    async def scenario() -> None:
        await controller.connect()
        await controller.renew()
        switch.holdings, switch.earlier_election = Holdings(), ElectionId(switch.term, 0xA, 1)
        await controller.connect()

    asyncio.run(scenario())
    assert set(connected(8)) <= set(switch.holdings.entries.values()), "it still knows its streams"


def test_a_switch_that_never_is_as_it_should_be_is_an_error(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings(), lambda holdings, _: holdings.drop(next(iter(holdings))))
    with pytest.raises(Unsure, match=f"switch tor0 differs .* {ROUNDS} times"):
        asyncio.run(controller.connect())
    assert len(switch.writes) == ROUNDS


def test_streams_that_another_controller_has_connected_stay(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings())
    asyncio.run(controller.connect())
    for entry in connected(8):
        switch.holdings.put(entry)
    again = asyncio.run(controller.connect())
    assert again.updates == 0
    assert list(controller.connected.by_stream.values()) == connected(8)[:1]


def test_a_switch_that_has_lost_everything_gets_its_streams_back(open_switch: Any) -> None:
    controller, switch = open_switch(Holdings.from_entities([*PLAN.holdings, *connected(8)]))
    asyncio.run(controller.connect())
    switch.holdings = Holdings()
    asyncio.run(controller.connect())
    assert set(connected(8)) <= set(switch.holdings.entries.values())
