"""The rules by which controllers of the same jobs claim switches, and a simulation of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from checkmate.job.schema import Job
from controlplane import standby
from controlplane.election import (
    Candidacy,
    ElectionId,
    Primary,
    ServerStanding,
    StandbyVerdict,
    SwitchWatch,
    earlier_switches,
    jobs_digest,
)
from testbed.jobs import job as some_job

JOBS, OTHER_JOBS = 0xA, 0xB
FREE, LED = (ServerStanding(primary, ElectionId(3, JOBS, 5)) for primary in (Primary.NOBODY, Primary.ANOTHER))


def test_a_higher_term_wins_whatever_the_jobs_are() -> None:
    most = (1 << 48) - 1
    assert (
        ElectionId(2, 1, 0).number > ElectionId(1, most, 9).number > ElectionId(1, most, 8).number > 1 << 64
    )
    assert ElectionId(1 << 63, most, 3).number < 1 << 128
    assert ElectionId.from_number(ElectionId(7, OTHER_JOBS, 9).number) == ElectionId(7, OTHER_JOBS, 9)
    assert ElectionId.from_number(1 << 40) == ElectionId(0, 0, 1 << 40), (
        "a controller that waits says nothing of its jobs"
    )


@pytest.fixture(scope="module")
def job() -> Job:
    return some_job()


def test_the_digest_is_of_what_switches_do(job: Job) -> None:
    assert jobs_digest([job]) == jobs_digest([replace(job, keys=Path("elsewhere"))])
    assert jobs_digest([job]) != jobs_digest([replace(job, channels=2)])
    second_job = replace(job, job="another")
    assert jobs_digest([job, second_job]) == jobs_digest([second_job, job]) != jobs_digest([job])
    assert 0 < jobs_digest([]) < 1 << 48


def test_a_bid_is_above_the_highest_and_displaces_only_its_own_jobs_primary() -> None:
    assert Candidacy(9, JOBS).bid(ServerStanding(Primary.NOBODY)) == ElectionId(1, JOBS, 9)
    assert Candidacy(9, OTHER_JOBS).bid(FREE) == ElectionId(4, OTHER_JOBS, 9), "whoever is told to run runs"
    assert Candidacy(9, JOBS).bid(LED) is None
    assert Candidacy(9, JOBS, displaces=True).bid(LED) == ElectionId(4, JOBS, 9)
    assert Candidacy(9, OTHER_JOBS, displaces=True).bid(LED) is None
    shell = ServerStanding(Primary.ANOTHER, ElectionId(1 << 32, 0, 0))
    assert Candidacy(9, 0, displaces=True).bid(shell) is None, "0 is not the name of any jobs"
    promoted = ServerStanding(Primary.THIS, ElectionId.from_number(77))
    assert Candidacy(9, JOBS).bid(promoted) == ElectionId(1, JOBS, 9), "BMv2's server promotes unasked"


def test_a_controller_that_waits_or_a_shell_is_only_in_the_way() -> None:
    promoted = ServerStanding(Primary.ANOTHER, ElectionId.from_number(77))
    assert Candidacy(9, JOBS).bid(promoted) == ElectionId(1, JOBS, 9), (
        "BMv2's server has promoted another standby"
    )
    assert watch(promoted).verdict is StandbyVerdict.CLAIM


def test_a_controller_is_not_kept_out_by_its_own_broken_connection() -> None:
    standing = ServerStanding(Primary.ANOTHER, ElectionId(3, JOBS, 9))
    assert Candidacy(9, JOBS).bid(standing) == ElectionId(4, JOBS, 9)


def test_a_controller_that_returns_does_not_undo_newer_jobs() -> None:
    assert Candidacy(9, OTHER_JOBS, returns=True).bid(FREE) is None
    assert Candidacy(9, JOBS, returns=True).bid(FREE) == ElectionId(4, JOBS, 9)
    assert Candidacy(5, OTHER_JOBS, returns=True).bid(FREE) == ElectionId(4, OTHER_JOBS, 5), (
        "the files were its own"
    )


def watch(*standings: ServerStanding | None, digests: tuple[int, ...] = (JOBS,)) -> SwitchWatch:
    """Return a watch of switches a, b, c that has seen the first ones."""
    switch_watch = SwitchWatch("cab", digests[0], digests)
    for name, standing in zip("abc", standings, strict=False):
        switch_watch.see(name, standing)
    return switch_watch


def test_a_switch_that_was_away_is_left_to_the_controller_that_knows_its_streams() -> None:
    assert not watch(FREE).is_back
    assert not watch(None, FREE).is_back
    switch_watch = watch(LED, LED)
    switch_watch.see("a", None)
    switch_watch.see("b", LED)
    assert (switch_watch.verdict, switch_watch.is_back) == (StandbyVerdict.WAIT, False)
    switch_watch.see("a", FREE)
    assert (switch_watch.verdict, switch_watch.is_back) == (StandbyVerdict.CLAIM, True)
    switch_watch.see("a", LED)
    assert (switch_watch.verdict, switch_watch.is_back) == (StandbyVerdict.WAIT, False)
    switch_watch.see("a", FREE)
    assert (switch_watch.verdict, switch_watch.is_back) == (StandbyVerdict.CLAIM, False), (
        "its primary has ended while it was there"
    )


def test_a_standby_gives_the_primary_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "HEAD_START_SECONDS", 0.3)

    async def waited(*then: ServerStanding) -> float:
        """Return the seconds until a switch is claimed that came back, and then shows these standings."""
        switch_watch, change = watch(None), asyncio.Event()
        switch_watch.see("a", FREE)
        began = time.monotonic()
        claimed = asyncio.create_task(standby._until_free(switch_watch, change))
        for standing in then:
            await asyncio.sleep(0.1)
            switch_watch.see("a", standing)
            change.set()
        await asyncio.wait_for(claimed, 2)
        return time.monotonic() - began

    assert asyncio.run(waited()) >= 0.3
    assert asyncio.run(waited(FREE)) >= 0.3, "an answer that changes nothing does not end it"
    assert 0.2 <= asyncio.run(waited(LED, FREE)) < 0.3, "that primary has served, and ended"


def test_the_first_reachable_switch_decides() -> None:
    assert watch().verdict is StandbyVerdict.WAIT, "nothing is known yet"
    assert watch(FREE).verdict is StandbyVerdict.CLAIM
    assert watch(LED, FREE, FREE).verdict is StandbyVerdict.WAIT
    assert watch(None, FREE, LED).verdict is StandbyVerdict.CLAIM
    assert watch(None, FREE, LED).reachable == ["b", "c"]
    assert watch(None, None, None).verdict is StandbyVerdict.WAIT
    assert [*earlier_switches("b", "cab")] == ["a"]


def test_a_new_switch_is_left_to_the_primary_that_has_not_read_the_files_yet() -> None:
    assert (
        watch(ServerStanding(Primary.NOBODY), LED, digests=(OTHER_JOBS, JOBS)).verdict
        is StandbyVerdict.OTHER_JOBS
    )
    assert watch(ServerStanding(Primary.NOBODY), LED).verdict is StandbyVerdict.CLAIM


def test_jobs_that_are_not_the_primarys_are_not_installed() -> None:
    assert watch(FREE, digests=(OTHER_JOBS,)).verdict is StandbyVerdict.OTHER_JOBS
    assert watch(FREE, digests=(OTHER_JOBS, JOBS)).verdict is StandbyVerdict.CLAIM, (
        "its files were the primary's before"
    )
    unknown = watch(LED, digests=(OTHER_JOBS,))
    unknown.see("a", ServerStanding(Primary.THIS, ElectionId.from_number(77)))
    assert unknown.verdict is StandbyVerdict.OTHER_JOBS, (
        "a server that promotes unasked forgets the last primary"
    )


class ElectionIdInUse(Exception):
    """A server ends the stream: the id is in use."""


@dataclass
class Server:
    """A switch's server: as the specification has it, or as BMv2's."""

    bmv2: bool
    streams: dict[str, int] = field(default_factory=dict)
    highest: int | None = None
    first: str | None = None

    def arbitrate(self, stream: str, number: int | None) -> ServerStanding:
        if self.bmv2:
            number = number or 0
        if number is not None and any(
            name != stream and election_id == number for name, election_id in self.streams.items()
        ):
            self.leave(stream)
            raise ElectionIdInUse
        self.streams[stream] = -1 if number is None else number
        if self.bmv2:
            self._promote()
        elif number is not None and number >= (self.highest or 0):
            self.highest, self.first = number, stream
        elif self.first == stream:
            self.first = None
        return self.standing(stream)

    def _promote(self) -> None:
        self.first = max(self.streams, key=lambda stream: self.streams[stream], default=None)
        self.highest = self.streams[self.first] if self.first is not None else None

    def leave(self, stream: str) -> None:
        self.streams.pop(stream, None)
        if self.bmv2:
            self._promote()
        elif self.first == stream:
            self.first = None

    def standing(self, stream: str) -> ServerStanding:
        primary = Primary.THIS if self.first == stream else Primary.ANOTHER if self.first else Primary.NOBODY
        return ServerStanding(primary, None if self.highest is None else ElectionId.from_number(self.highest))


@dataclass
class Controller:
    """A standby that follows the rules as `standby` and `serve` do, a step at a time."""

    name: str
    servers: dict[str, Server]
    broken_links: set[tuple[str, str]]
    numbers: Iterator[int]
    alive: bool = True
    watch: SwitchWatch | None = None
    bids: dict[str, ElectionId] = field(default_factory=dict)

    def reaches(self, switch: str) -> bool:
        return (self.name, switch) not in self.broken_links

    def end(self) -> None:
        """Close all streams; a server notices even if it cannot be reached, after a while."""
        for server in self.servers.values():
            server.leave(f"{self.name} serves")
            server.leave(f"{self.name} waits")
        self.watch, self.bids = None, {}

    def step(self) -> None:
        self._serve() if self.bids else self._wait()

    def _wait(self) -> None:
        self.watch = self.watch or SwitchWatch(self.servers, JOBS)
        for name, server in self.servers.items():
            stream = f"{self.name} waits"
            if not self.reaches(name):
                server.leave(stream)
                self.watch.see(name, None)
            elif stream in server.streams:
                self.watch.see(name, server.standing(stream))
            else:
                self.watch.see(name, server.arbitrate(stream, next(self.numbers) if server.bmv2 else None))
        if self.watch.verdict is StandbyVerdict.CLAIM:
            reachable = self.watch.reachable
            self.watch = None
            for name in self.servers:
                self.servers[name].leave(f"{self.name} waits")
            for name in reachable:
                if not self._claim(name):
                    self.end()
                    return

    def _claim(self, switch: str) -> bool:
        server, stream = self.servers[switch], f"{self.name} serves"
        earlier = any(name in self.bids for name in earlier_switches(switch, self.servers))
        candidacy = Candidacy(ord(self.name), JOBS, displaces=earlier)
        try:
            standing = server.arbitrate(stream, next(self.numbers) if server.bmv2 else None)
            bid = candidacy.bid(standing)
            if bid is None or server.arbitrate(stream, bid.number).primary is not Primary.THIS:
                return False
        except ElectionIdInUse:
            return False
        self.bids[switch] = bid
        return True

    def _serve(self) -> None:
        for name, server in self.servers.items():
            stream = f"{self.name} serves"
            if not self.reaches(name) or stream not in server.streams:
                server.leave(stream)
                self.bids.pop(name, None)
            elif name in self.bids and server.first != stream:
                self.end()
                return
        for name in self.servers:
            if self.reaches(name) and name not in self.bids and not self._claim(name):
                self.end()
                return


@pytest.mark.parametrize("kinds", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_one_controller_serves_all_switches_in_the_end(
    kinds: tuple[bool, ...], seed: int
) -> None:
    generator = random.Random(seed)
    servers = {name: Server(bmv2) for name, bmv2 in zip("abc", kinds, strict=True)}
    broken_links: set[tuple[str, str]] = set()
    numbers = count(1000)
    controllers = [Controller(name, servers, broken_links, numbers) for name in ("x", "y", "z")]
    for _ in range(150):
        target, switch = generator.choice(controllers), generator.choice("abc")
        event = generator.random()
        if event < 0.04:
            target.end()
            target.alive = False
        elif event < 0.1:
            target.alive = True
        elif event < 0.15:
            broken_links.add((target.name, switch))
        elif event < 0.25:
            broken_links.discard((target.name, switch))
        elif event < 0.28:
            servers[switch] = servers[switch].__class__(servers[switch].bmv2)
        elif target.alive:
            target.step()
        first = [controller.bids for controller in controllers if controller.bids]
        served = [name for bids in first for name, bid in bids.items() if bid.number == servers[name].highest]
        assert len(set(served)) == len(served), "no switch obeys two"
    broken_links.clear()
    for controller in controllers:
        controller.alive = True
    for _ in range(12):
        generator.shuffle(controllers)
        for controller in controllers:
            controller.step()
    (leader,) = [controller for controller in controllers if controller.bids]
    assert set(leader.bids) == set(servers)
    assert {server.first for server in servers.values()} == {f"{leader.name} serves"}
