"""The schedule of a game day, and its model of who holds which shard."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gameday.acts import SEEDED, Act, Incident, lost_shards, together_down, unsound
from tests.gameday.draw import OF_A_JOB, OF_THE_FABRIC, schedule
from tests.gameday.parties import CABLES, CONTROLLERS, DDP, FSDP, HSDP, PARTIES, SWITCHES, lab

KINDS = len(OF_A_JOB) + len(OF_THE_FABRIC)


def parts() -> set[str]:
    """Return all that an act may be about."""
    topology_of_all = lab("gameday")
    names = {*SWITCHES, *CABLES, *CONTROLLERS, "primary"}
    for party, topology in zip(PARTIES.values(), topology_of_all.jobs, strict=True):
        names |= {f"{party.name}.{rank.name}" for rank in topology.ranks}
        names |= {f"{party.name}.shadow{node.number}" for node in topology.shadow_nodes}
        names |= {f"{party.name}.disk", f"{party.name}.events"}
    return names


@given(st.integers(0, 10**6))
def test_a_seed_gives_one_schedule_of_things_that_the_lab_has(seed: int) -> None:
    known_parts = parts()
    first = [*islice(schedule(seed), 2 * KINDS)]
    assert first == [*islice(schedule(seed), 2 * KINDS)]
    for incident in first:
        assert {act.who for act in incident.acts} <= known_parts
        assert [act.at for act in incident.acts] == sorted(act.at for act in incident.acts)
        names = [act.who for act in incident.acts]
        assert len(names) == len(set(names)), "nobody is struck twice at once"


@given(st.integers(0, 10**6))
def test_every_kind_comes_once_before_any_comes_again(seed: int) -> None:
    kinds_seen: list[str] = []
    for incident in schedule(seed):
        kinds_seen += [name.rpartition(": ")[2] for name in incident.name.split(", ")]
        if len(kinds_seen) >= KINDS:
            break
    assert sorted(kinds_seen) == sorted((*OF_A_JOB, *OF_THE_FABRIC))


@given(st.integers(0, 10**6))
def test_the_disk_is_expected_of_lost_shards_and_of_nothing_else(seed: int) -> None:
    for incident in islice(schedule(seed), KINDS):
        parties = {
            part.partition(":")[0] for part in incident.name.split(", ") if part.endswith(": lost shard")
        }
        assert incident.disk == parties


def test_a_shard_is_lost_from_the_death_of_its_last_holder_until_one_is_seeded() -> None:
    acts = [Act(1, "kill", "ddp.shadow0", 2.0), Act(2, "kill", "ddp.shadow1", 2.0)]
    assert DDP.shards() == {(0, 0): {0, 1}, (0, 1): {1, 2}, (0, 2): {2, 0}}
    assert lost_shards(acts, "ddp", 1.5) == []
    assert lost_shards(acts, "ddp", 2) == [(0, 0)]
    assert lost_shards(acts, "ddp", 2.9 + SEEDED) == [(0, 0)]
    assert lost_shards(acts, "ddp", 3 + SEEDED) == []
    assert lost_shards(acts, "hsdp", 2) == []
    both = [Act(0, "kill", f"hsdp.shadow{node}", 2.0) for node in HSDP.nodes]
    assert lost_shards(both, "hsdp", 0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert FSDP.shards() == HSDP.shards()
    stalls = [Act(0, "stall", f"hsdp.shadow{node}", 2.0) for node in HSDP.nodes]
    assert lost_shards(stalls, "hsdp", 0) == []


def test_a_rank_that_dies_before_the_holders_needs_no_disk() -> None:
    kills = [Act(1, "kill", f"hsdp.shadow{node}", 2.0) for node in HSDP.nodes]
    assert Incident("x", (*kills, Act(1.4, "kill", "hsdp.rank1"))).disk == {"hsdp"}
    assert Incident("x", (Act(0, "kill", "hsdp.rank1"), *kills)).disk == set()
    assert Incident("x", (*kills, Act(1.4, "kill", "ddp.rank1"))).disk == set()
    assert Incident("x", (*kills, Act(1.4, "stall", "hsdp.rank1", 1))).disk == set()


@pytest.mark.parametrize(
    ("act", "ddp", "hsdp", "fsdp"),
    [
        (Act(0, "kill", "ddp.shadow2", 1), {2}, set(), set()),
        (Act(0, "down", "hsdp.shadow1", 1), set(), {1}, set()),
        (Act(0, "down", "fsdp.shadow1", 1), set(), set(), {1}),
        (Act(0, "stall", "ddp.shadow2", 1), set(), set(), set()),
        (Act(0, "kill", "ddp.rank0"), set(), set(), set()),
        (Act(0, "kill", "tor2", 1), {0, 1, 2}, {0, 1}, set()),
        (Act(0, "down", "tor0-tor1", 1), {0, 1, 2}, {0, 1}, set()),
        (Act(0, "kill", "ctl0", 1), set(), set(), set()),
        (Act(0, "fill", "ddp.disk", 1), set(), set(), set()),
    ],
)
def test_who_may_lose_state(act: Act, ddp: set[int], hsdp: set[int], fsdp: set[int]) -> None:
    """Hosts that copy gradients lose nothing by switches."""
    assert [unsound([act], job) for job in ("ddp", "hsdp", "fsdp")] == [ddp, hsdp, fsdp]


def test_when_all_of_some_are_down_at_once() -> None:
    acts = [Act(0, "kill", "ctl0", 10), Act(4, "kill", "ctl1", 3), Act(20, "kill", "ctl1", 3)]
    assert [*together_down(acts, frozenset(CONTROLLERS))] == [(4, 7)]
    assert [*together_down(acts, frozenset({"ctl0", "tor0"}))] == []
