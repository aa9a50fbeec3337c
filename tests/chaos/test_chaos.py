"""The chaos harness: its pure parts, a fixed corpus of seeds, and ten minutes of random ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.compare import differences
from tests.chaos.forked import Forked
from tests.chaos.generate import UnknownFeature, generate
from tests.chaos.oracle import Fact, PastStart, ResumePromise, loses, promise, settles
from tests.chaos.run import TrialOutcome
from tests.chaos.scenario import FEATURES, Event, ModelSpec, NetworkSpec, Scenario
from tests.chaos.shrink import shrink, smaller_ones
from tests.support import terminated
from tests.support.labs.live import needs_clang, needs_root
from topologies.describe.topology import build

CORPUS = ("9", "47")
HOSTS_CORPUS = "1,7,25,29"
"""Jobs with several ranks a host, sharded or not; ranks, nodes, links and controllers fail."""
COPIES_CORPUS = "21,32,38,45"
"""Jobs whose hosts copy gradients: DDP, and FSDP2 with and without replicas; ranks, nodes and links fail."""
OFF: dict[str, str] = {}
"""Features that are off in the corpus and in random runs, each with the known defect."""

TWO = NetworkSpec(nodes=(1, 1))
TWICE = NetworkSpec(nodes=(1, 1), replicas=2)
LIVE = [Fact(1.0, "live", 0), Fact(1.0, "live", 1)]
CRASHED = PastStart(resumed=0, completed=20, over=10.0, clean=False)


ONE_SEED, SEEDS, RANDOM = 190, 390, 990
"""Seconds in which the harness must end."""


def chaos(*arguments: str, seconds: float) -> None:
    """Run the harness, and show its output if it fails."""
    command = [sys.executable, "-m", "tests.chaos", *arguments, "--without", ",".join(OFF)]
    result = terminated.run(command, seconds)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_root
@needs_clang
@terminated.time_limit(ONE_SEED)
@pytest.mark.parametrize(
    "seed", [CORPUS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in CORPUS[1:])]
)
def test_a_fixed_corpus(seed: str) -> None:
    chaos("--seeds", seed, seconds=ONE_SEED)


@needs_root
@needs_clang
@pytest.mark.slow
@terminated.time_limit(SEEDS)
def test_a_fixed_corpus_of_hosts_with_several_ranks() -> None:
    networks = [generate(int(seed)).network for seed in HOSTS_CORPUS.split(",")]
    assert [(network.sharded, network.together) for network in networks].count((True, False)) == 2
    assert [(network.sharded, network.together) for network in networks].count((False, True)) == 2
    chaos("--seeds", HOSTS_CORPUS, seconds=SEEDS)


@needs_root
@pytest.mark.slow
@terminated.time_limit(SEEDS)
def test_a_fixed_corpus_of_hosts_that_copy_gradients() -> None:
    """Nothing of it needs a compiler."""
    networks = [generate(int(seed)).network for seed in COPIES_CORPUS.split(",")]
    assert {network.copies for network in networks} == {"host"}
    shapes = {(network.sharded, network.ranks > 1) for network in networks}
    assert shapes == {(False, True), (True, True), (True, False)}
    chaos("--seeds", COPIES_CORPUS, seconds=SEEDS)


@needs_root
@needs_clang
@pytest.mark.slow
@terminated.time_limit(RANDOM)
def test_ten_minutes_of_random_seeds() -> None:
    chaos("--minutes", "10", seconds=RANDOM)


@given(st.integers(0, 10**6))
def test_a_seed_gives_one_scenario_that_a_lab_can_have(seed: int) -> None:
    scenario = generate(seed)
    assert scenario == generate(seed)
    assert Scenario.from_json(scenario.to_json()) == scenario
    topology = build("chaos", scenario.network.topology())
    assert len(topology.ranks) == scenario.network.world
    names = {
        "ctl",
        "job",
        *(shard_group.name for shard_group in topology.switches),
        *(shard_group.name for shard_group in topology.ranks),
    }
    names |= {shard_group.name for shard_group in topology.shadow_nodes}
    if scenario.network.in_place:
        names |= {f"host{host}" for host in range(scenario.network.by_host[0])}
    if scenario.network.recovery == "spare":
        names |= {f"spare{host}" for host in range(scenario.network.by_host[0])}
    assert len(topology.trainers) == scenario.network.by_host[0]
    assert {event.who for event in scenario.events} <= names
    nodes = range(len(scenario.network.nodes))
    groups = [group.shadow_nodes or tuple(nodes) for group in topology.groups]
    assert [holders[0] for holders in scenario.network.holders()] == [
        shard_group for group in groups for shard_group in group
    ]
    assert all(0 <= event.at < scenario.model.iterations - 4 for event in scenario.events)


def test_seeds_have_every_kind_of_event_and_every_part() -> None:
    scenarios = [generate(seed, ["by-hosts", "in-place"]) for seed in range(400)]
    kinds = {
        (event.kind, event.who.rstrip("0123456789")) for scenario in scenarios for event in scenario.events
    }
    hosts = ("rank", "shadow")
    assert kinds == {
        *(("kill", target) for target in (*hosts, "tor", "ctl")),
        *(("stall", target) for target in (*hosts, "tor")),
        *(("down", target) for target in hosts),
        *(("terminate", "rank"), ("error", "rank"), ("close", "job")),
    }
    assert {part for scenario in scenarios for part in scenario.model.parts} <= set(FEATURES)
    assert {scenario.network.ranks for scenario in scenarios} == {2, 3, 4, 5}
    assert {scenario.network.switches for scenario in scenarios} == {1, 2, 3}
    assert {(scenario.network.shards > 1, scenario.network.together) for scenario in scenarios} == {
        (False, False),
        (True, False),
        (True, True),
    }
    sharded = [scenario for scenario in scenarios if scenario.network.sharded]
    assert {(scenario.network.ranks, scenario.network.shards) for scenario in sharded} == {
        (2, 2),
        (3, 2),
        (2, 3),
    }
    assert {scenario.model.precision for scenario in sharded} == {"fp32", "bf16", "bf16-gradients"}


def test_a_third_has_no_switch_and_every_shape_and_event_that_needs_none() -> None:
    """The others are the scenarios that there are without the feature."""
    scenarios = [generate(seed, ["in-place"]) for seed in range(400)]
    by_hosts = [scenario for scenario in scenarios if scenario.network.copies == "host"]
    assert len(scenarios) / 4 < len(by_hosts) < len(scenarios) / 2
    assert all(s in by_hosts or s == generate(s.seed, ["by-hosts", "in-place"]) for s in scenarios)
    networks = [scenario.network for scenario in by_hosts]
    assert {(network.ranks, network.shards, network.together) for network in networks} == {
        *((ranks, 1, False) for ranks in (2, 3, 4, 5)),  # DDP, a rank on each host
        *((ranks, 2, True) for ranks in (2, 3)),  # DDP, two ranks on each host
        *((2, shards, False) for shards in (2, 3)),  # FSDP2 with replicas
        *((1, shards, False) for shards in (2, 3, 4)),  # and without
    }
    assert {network.replicas for network in networks} == {1, 2}
    kinds = {(event.kind, event.who.rstrip("0123456789")) for s in by_hosts for event in s.events}
    assert kinds == {
        *((kind, host) for kind in ("kill", "stall", "down") for host in ("rank", "shadow")),
        *(("terminate", "rank"), ("error", "rank"), ("close", "job")),
    }
    for network in networks:
        assert len(build("chaos", network.topology()).groups) == network.groups
    unsharded = [generate(seed, ["shards", "together"]).network for seed in range(400)]
    assert {network.shards for network in unsharded} == {1}


def test_a_third_recovers_in_place_with_every_shape_and_event_that_others_have() -> None:
    """The others are the scenarios that there are without the feature."""
    scenarios = [generate(seed) for seed in range(600)]
    in_place = [scenario for scenario in scenarios if scenario.network.in_place]
    assert len(scenarios) / 4 < len(in_place) < len(scenarios) / 2
    assert all(s in in_place or s == generate(s.seed, ["in-place"]) for s in scenarios)
    networks = [scenario.network for scenario in in_place]
    ways = {(network.copies, network.recovery, network.keeping, network.sharded) for network in networks}
    assert len(ways) == 2**4
    kinds = {(event.kind, event.who.rstrip("0123456789")) for s in in_place for event in s.events}
    assert kinds >= {("kill", name) for name in ("rank", "shadow", "host", "spare", "tor", "ctl")}
    for scenario in in_place:
        kills = [event for event in scenario.events if event.kind == "kill"]
        assert any(event.who.startswith(("rank", "host", "spare")) for event in kills)
    first = [generate(seed, ["spares"]).network.recovery for seed in range(100)]
    assert set(first) == {"restart", "in-place"}


def test_a_feature_that_is_left_out_changes_no_other() -> None:
    for seed in range(100):
        whole, without = generate(seed), generate(seed, ["stalls", "norm", "fast"])
        assert "norm" not in without.model.parts
        assert not any(event.kind == "stall" for event in without.events)
        assert without.model.pause > 0
        assert without.network == whole.network
        assert without.model.options == whole.model.options
        assert set(whole.model.parts) - set(without.model.parts) <= {"norm"}


def test_a_feature_that_there_is_not_is_named() -> None:
    with pytest.raises(UnknownFeature, match="no feature stall; there are memory-format, "):
        generate(1, ["stall"])


def promise_of(facts: list[Fact], network: NetworkSpec = TWO, before: PastStart = CRASHED) -> ResumePromise:
    return promise(network, [*LIVE, *facts], before, 12.0, on_disk=False)


def test_a_crash_repeats_one_iteration_and_a_clean_stop_none() -> None:
    assert promise_of([]) == ResumePromise(20)
    assert promise_of([], before=replace(CRASHED, clean=True)) == ResumePromise(21)


def test_a_start_that_completed_nothing_loses_nothing() -> None:
    assert promise_of([], before=PastStart(20, None, 10.0, clean=False)) == ResumePromise(20)
    assert promise_of([], before=PastStart(20, 20, 10.0, clean=False)) == ResumePromise(20)


@pytest.mark.parametrize("at", [9.0, 11.0])
def test_a_shard_without_a_sound_holder_may_be_lost(at: float) -> None:
    """Its node was killed before the crash, or before the next start."""
    assert promise_of([Fact(at, "lost", 1)]) == ResumePromise(20, lost=(1,))
    assert promise_of([Fact(at, "lost", 1)], TWICE) == ResumePromise(20)
    both = [Fact(at, "lost", 0), Fact(at, "lost", 1)]
    assert promise_of(both, TWICE) == ResumePromise(20, lost=(0, 1), unknown=True)


def test_a_node_that_is_live_again_before_the_crash_is_sound() -> None:
    assert promise_of([Fact(5.0, "lost", 1), Fact(9.0, "live", 1)]) == ResumePromise(20)
    assert promise_of([Fact(5.0, "lost", 1), Fact(11.0, "live", 1)]).lost == (1,)
    assert promise_of([Fact(9.0, "lost", 1), Fact(8.0, "live", 1)]).lost == (1,)


def test_each_shard_of_a_sharded_model_has_holders_of_its_own() -> None:
    """Two DP groups: of three nodes, the first has one and the second two; a node may hold several shards."""
    network = NetworkSpec(shards=2, nodes=(1, 1, 1))
    assert network.holders() == [[0], [1], [2]]
    assert replace(network, replicas=2).holders() == [[0, 1], [1, 0], [1, 2], [2, 1]]
    alone = replace(network, nodes=(1,))
    assert promise_of([Fact(9.0, "lost", 0)], alone) == ResumePromise(20, lost=(0, 1), unknown=True)
    live = [*LIVE, Fact(1.0, "live", 2)]
    promised = promise(network, [*live, Fact(9.0, "lost", 1)], CRASHED, 12.0, on_disk=False)
    assert promised == ResumePromise(20, lost=(1,))


def test_nodes_that_were_never_live_promise_nothing() -> None:
    assert promise(TWO, [], CRASHED, 12.0, on_disk=False).lost == (0, 1)


def test_a_promise_is_broken_by_what_is_earlier_and_by_errors() -> None:
    assert ResumePromise(20).broken_by(20) == ResumePromise(20).broken_by(21) == ""
    assert ResumePromise(20).broken_by(19) == "resumed with 19, 1 earlier than promised"
    assert ResumePromise(20).broken_by(None) == "RestoreError, promised was 20 or later"
    promised = ResumePromise(20, lost=(1,))
    assert promised.broken_by(3) == promised.broken_by(None) == ""
    assert "without an error" in promised.broken_by(0, silent=True)
    assert replace(promised, unknown=True).broken_by(0, silent=True) == ""
    assert "on disk" in replace(promised, on_disk=True).broken_by(None)


def test_what_loses_something() -> None:
    assert loses(Event(3, "kill", "shadow1"), TWO, False) == [1]
    assert loses(Event(3, "down", "shadow0"), TWO, False) == [0]
    assert loses(Event(3, "stall", "shadow0", seconds=6), TWO, False) == []
    assert loses(Event(3, "kill", "rank0"), TWO, False) == []
    assert loses(Event(3, "kill", "tor0"), TWO, False) == []
    assert loses(Event(3, "kill", "tor0"), TWO, True) == [0, 1]
    assert loses(Event(3, "kill", "tor1"), replace(TWO, switches=2), False) == [0, 1]
    assert settles(Event(3, "down", "shadow0")) > settles(Event(3, "kill", "shadow0")) == 0


def test_a_signal_to_a_process_that_has_just_ended_is_nothing() -> None:
    """The server of forked processes reaps them, and tells their status a moment later."""
    finished = subprocess.Popen(["true"])
    finished.wait()
    Forked(SimpleNamespace(pid=finished.pid, exitcode=None)).kill()  # type: ignore[arg-type]


def line(
    event: str, iteration: int, attempt: int = 0, loss: str = "1.0", **digests: str
) -> dict[str, object]:
    digest = " ".join(f"{name}={value}" for name, value in digests.items())
    return {"event": event, "attempt": attempt, "iteration": iteration, "loss": loss, "digest": digest}


def test_differences_are_told_once_a_start() -> None:
    expected = [line("iteration", i, model="a", torch="b") for i in range(4)]
    same = [line("resumed", 0), *expected[:2], line("resumed", 2, 1, model="a", torch="b")]
    assert differences(0, same, expected) == []
    differing = [line("iteration", 2, 1, model="a", torch="c"), line("iteration", 3, 1, "2.0")]
    assert differences(0, differing, expected) == ["rank0, start 1: after iteration 2 differ torch"]
    restored = [line("resumed", 2, 1, model="x", torch="b")]
    assert differences(0, restored, expected) == ["rank0, start 1: as restored (iteration 2) differ model"]
    assert differences(1, restored, expected) == []
    loss = [line("iteration", 3, 2, "2.0", model="a", torch="b")]
    assert differences(1, loss, expected) == ["rank1, start 2: the loss of iteration 3 differs"]


def test_shrinking_leaves_what_it_takes_to_fail() -> None:
    """The run fails if there is a scalar and a stall."""
    whole = Scenario(
        5,
        ModelSpec(parts=("norm", "scalar", "ema"), clip=0.5, turned=("flat",)),
        NetworkSpec(ranks=4, nodes=(1, 1), channels=2),
        (Event(3, "kill", "rank0"), Event(5, "stall", "shadow0", 0.0, 1.0)),
    )

    def attempt(scenario: Scenario) -> TrialOutcome:
        fails = scenario.model.has("scalar") and any(event.kind == "stall" for event in scenario.events)
        return TrialOutcome(scenario, problems=["it failed"] if fails else [])

    smallest = shrink(whole, attempt)
    assert smallest is not None
    assert smallest.scenario.model.parts == ("scalar",)
    assert [event.kind for event in smallest.scenario.events] == ["stall"]
    assert smallest.scenario.network == NetworkSpec()
    assert shrink(smallest.scenario, TrialOutcome) is None
    assert all(smaller != smallest.scenario for _, smaller in smaller_ones(smallest.scenario))
