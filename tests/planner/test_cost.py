"""The cost model's properties, and its simulation against closed forms."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate.planner.cost import failures, model
from checkmate.planner.cost.failures import NeverDone, ShadowNodes, Spread
from checkmate.planner.cost.model import Prices, TrainingRun

RUNS = 2_000
trainings = st.builds(
    TrainingRun,
    gpus=st.integers(1, 100_000),
    failures_per_gpu_hour=st.floats(1e-8, 1e-3),
    duration_hours=st.floats(24, 5_000),
    iteration_s=st.floats(0.05, 60),
)
stalls = st.floats(1e-3, 600)
prices = st.builds(Prices, st.floats(0.1, 100), st.floats(0.01, 100))
LLAMA3 = TrainingRun(16_384, 2e-5, 54 * 24, 4.58)
SAFE = ShadowNodes(128, 2, 0.0, 0.1, 1.0)


@given(trainings, stalls, st.floats(1, 1e6))
def test_the_best_interval_is_a_minimum(training: TrainingRun, stall_s: float, interval: float) -> None:
    least = model.least_waste(training, stall_s).gpu_hours
    assert least <= model.conventional_waste(training, stall_s, interval).gpu_hours * (1 + 1e-9)


@given(trainings, stalls, st.integers(1, 100_000))
def test_the_best_whole_interval_is_one_among_whole_ones(
    training: TrainingRun, stall_s: float, interval: int
) -> None:
    assume(interval <= training.iterations)
    best = model.best_every_iterations(training, stall_s)
    least = model.conventional_waste(training, stall_s, best).gpu_hours
    assert 1 <= best <= max(1, training.iterations)
    assert least <= model.conventional_waste(training, stall_s, interval).gpu_hours * (1 + 1e-9)


@given(trainings, stalls)
def test_the_least_waste_is_the_papers_square_root(training: TrainingRun, stall_s: float) -> None:
    assume(model.best_interval_iterations(training, stall_s) > 1)
    root = math.sqrt(2 * stall_s / 3600 * training.failures_per_hour)
    assert model.least_waste(training, stall_s).gpu_hours == pytest.approx(training.gpu_hours * root)


@given(trainings, stalls, st.floats(1, 10))
def test_longer_stalls_and_more_failures_waste_and_save_more(
    training: TrainingRun, stall_s: float, times: float
) -> None:
    more = TrainingRun(
        training.gpus, training.failures_per_gpu_hour * times, training.duration_hours, training.iteration_s
    )
    for worse, stall in ((training, stall_s * times), (more, stall_s)):
        least = model.least_waste(worse, stall).gpu_hours
        assert least >= model.least_waste(training, stall_s).gpu_hours * (1 - 1e-9)
    longer = model.saved_gpu_hours(training, stall_s * times)
    assert longer >= model.saved_gpu_hours(training, stall_s) * (1 - 1e-9) >= 0


@given(trainings, prices, st.integers(1, 1_000), st.sampled_from([0.0, 0.01, 0.3]))
def test_both_cost_the_same_at_the_break_even_stall(
    training: TrainingRun, paid: Prices, shadow_nodes: int, slowdown: float
) -> None:
    stall_s = model.break_even_stall_s(training, paid, shadow_nodes, slowdown)
    nodes = model.node_hours(training.duration_hours * (1 + slowdown), shadow_nodes)
    checkmate_cost = sum(model.dollars(model.checkmate_waste(training, slowdown), paid, nodes))
    for stall, cheaper in ((stall_s * 1.01, True), (stall_s * 0.99, False)):
        conventional_cost = sum(model.dollars(model.least_waste(training, stall), paid))
        assert conventional_cost == pytest.approx(checkmate_cost, rel=0.011)
        assert (
            checkmate_cost <= conventional_cost * (1 + 1e-12)
        ) is cheaper or conventional_cost == pytest.approx(checkmate_cost, rel=1e-9)


def mean_is(spread: Spread, expected_waste_hours: float) -> None:
    """Check the mean within four standard errors. Seeds are fixed, so the result is reproducible."""
    wasted = spread.wasted_hours
    error = wasted.std() / math.sqrt(len(wasted))
    assert abs(wasted.mean() - expected_waste_hours) < 4 * error + 1e-9 * expected_waste_hours


def expected_hours(training: TrainingRun, stall_s: float, every_iterations: int, restart_s: float) -> float:
    """Return the exact expected time of a run: e^(ΛR) · (e^(Λ(τ+ω)) - 1) / Λ for each segment.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
    """
    rate = training.failures_per_hour
    segment = (every_iterations * training.iteration_s + stall_s) / 3600
    segment_hours = math.exp(rate * restart_s / 3600) * math.expm1(rate * segment) / rate
    return training.iterations / every_iterations * segment_hours


@pytest.mark.parametrize("interval", [1, 36, 393, 3_000])
@pytest.mark.parametrize("restart_s", [0.0, 600.0])
def test_conventional_runs_take_what_the_exact_form_says(interval: int, restart_s: float) -> None:
    """Iterations that divide into whole segments; failures in stalls and restarts count here as there."""
    iterations = 150 * 3_000 * 2
    training = TrainingRun(16_384, 2e-5, iterations // interval * interval * 4.58 / 3600, 4.58)
    spread = failures.simulate_conventional(training, 1.2, interval, restart_s, RUNS, seed=1)
    mean_is(spread, expected_hours(training, 1.2, interval, restart_s) - training.duration_hours)


def test_checkmate_runs_take_what_the_exact_form_says() -> None:
    for restart_s in (0.0, 600.0):
        spread = failures.simulate_checkmate(LLAMA3, SAFE, restart_s, RUNS, seed=2)
        whole = TrainingRun(LLAMA3.gpus, 2e-5, round(LLAMA3.iterations) * 4.58 / 3600, 4.58)
        mean_is(spread, expected_hours(whole, 0.0, 1, restart_s) - whole.duration_hours)
        assert not spread.fallbacks.any()


@pytest.mark.parametrize("interval", [4, 36])
def test_where_failures_are_rare_in_a_segment_all_agree_with_the_papers_form(interval: int) -> None:
    papers = model.conventional_waste(LLAMA3, 1.2, interval).gpu_hours
    exact = (expected_hours(LLAMA3, 1.2, interval, 0.0) - LLAMA3.duration_hours) * LLAMA3.gpus
    simulated = (
        failures.simulate_conventional(LLAMA3, 1.2, interval, 0.0, RUNS, seed=3).wasted_hours * LLAMA3.gpus
    )
    assert exact == pytest.approx(papers, rel=0.02)
    assert simulated.mean() == pytest.approx(papers, rel=0.02)
    simulated_waste = failures.simulate_checkmate(LLAMA3, SAFE, 0.0, RUNS, seed=3).wasted_hours * LLAMA3.gpus
    assert simulated_waste.mean() == pytest.approx(model.checkmate_waste(LLAMA3).gpu_hours, rel=0.01)


def walk(
    training: TrainingRun, stall_s: float, interval: int, restart_s: float, seed: int
) -> tuple[float, int]:
    """Simulate one run along a clock, as a reference. Return hours and failures."""
    generator = np.random.default_rng(seed)
    now, completed, failed = 0.0, 0, 0
    next_failure = generator.exponential(1 / training.failures_per_hour)
    while completed < round(training.iterations):
        step = min(interval, round(training.iterations) - completed)
        took = (step * training.iteration_s + (stall_s if step == interval else 0)) / 3600
        if now + took <= next_failure:
            now, completed = now + took, completed + step
            continue
        while True:
            now, failed = next_failure, failed + 1
            next_failure = now + generator.exponential(1 / training.failures_per_hour)
            if now + restart_s / 3600 <= next_failure:
                now += restart_s / 3600
                break
    return now, failed


def test_the_simulation_spreads_as_a_run_along_a_clock_does() -> None:
    """Mean and spread of both samples; three whole segments of five hours, and most of another."""
    training = TrainingRun(1_000, 2e-4, 20.0, 3.0)
    walked = [walk(training, 3_600.0, 6_500, 1_200.0, seed) for seed in range(3_000)]
    hours, failed = np.array(walked).T
    spread = failures.simulate_conventional(training, 3_600.0, 6_500, 1_200.0, 50_000, seed=4)
    total = spread.wasted_hours + round(training.iterations) * 3.0 / 3600
    for simulated, reference in ((total, hours), (spread.failures, failed)):
        error = reference.std() / math.sqrt(len(reference))
        assert abs(simulated.mean() - reference.mean()) < 4 * error
        assert simulated.std() == pytest.approx(reference.std(), rel=0.1)


def test_the_same_seed_gives_the_same_runs_and_another_gives_others() -> None:
    first, again, different = (
        failures.simulate_conventional(LLAMA3, 1.2, 36, 60.0, 500, seed).wasted_hours for seed in (5, 5, 6)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, different)


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0, 1))
def test_a_run_of_down_nodes_is_as_probable_as_counting_says(nodes: int, run: int, p: float) -> None:
    probability = sum(
        p ** sum(down) * (1 - p) ** (nodes - sum(down))
        for down in itertools.product((0, 1), repeat=nodes)
        if run <= nodes and any(all(down[(at + i) % nodes] for i in range(run)) for at in range(nodes))
    )
    assert failures.run_probability(nodes, run, p) == pytest.approx(probability, abs=1e-12)


@pytest.mark.parametrize(("run", "p"), [(64, 0.5), (65_535, 1e-4), (65_536, 0.999), (1, 1e-9)])
def test_the_most_nodes_take_no_time(run: int, p: float) -> None:
    start = time.process_time()
    probability = failures.run_probability(65_536, run, p)
    assert time.process_time() - start < 2
    line = 65_536 * (1 - p) * p**run  # of runs that begin at a node; few, so almost that of one
    assert probability == pytest.approx(min(1.0, line) if run < 65_536 else p**run, rel=1e-4, abs=1e-300)


def test_a_small_probability_is_not_lost_in_rounding() -> None:
    assert failures.run_probability(128, 3, 1e-7) == pytest.approx(128e-21, rel=1e-4)


def test_shadow_failures_cost_what_the_disk_lacks_and_replicas_spare_it() -> None:
    frail = ShadowNodes(16, 1, 1e-3, 0.5, 2.0)
    alone = failures.simulate_checkmate(LLAMA3, frail, 60.0, RUNS, seed=7)
    gone_share = frail.gone_probability(60 / 3600)
    assert gone_share == pytest.approx(16 * 1e-3 * 0.5, rel=0.1)
    assert alone.fallbacks.mean() == pytest.approx(gone_share * alone.failures.mean(), rel=0.1)
    safe = failures.simulate_checkmate(LLAMA3, SAFE, 60.0, RUNS, seed=7)
    extra = alone.repeated_hours.mean() - safe.repeated_hours.mean()
    assert extra == pytest.approx(alone.fallbacks.mean() * 1.0, rel=0.1)  # half of two hours each
    wider = failures.simulate_checkmate(LLAMA3, ShadowNodes(16, 2, 1e-3, 0.5, 2.0), 60.0, RUNS, seed=7)
    assert wider.fallbacks.sum() < alone.fallbacks.sum() / 100


def test_batches_of_runs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = failures.simulate_conventional(LLAMA3, 1.2, 36, 60.0, 300, seed=8)
    monkeypatch.setattr(failures, "DRAWS_AT_ONCE", 1_000)
    parts = failures.simulate_conventional(LLAMA3, 1.2, 36, 60.0, 300, seed=8)
    assert np.allclose(whole.repeated_hours, parts.repeated_hours)


def test_what_never_ends_or_takes_too_long_is_refused() -> None:
    with pytest.raises(NeverDone, match="would make no progress"):
        failures.simulate_conventional(LLAMA3, 1.2, 200_000, 0.0, 10, seed=0)
    with pytest.raises(NeverDone, match="would make no progress"):
        failures.simulate_conventional(LLAMA3, 1.2, 36, 30 * 86_400.0, 10, seed=0)
    with pytest.raises(NeverDone, match=r"simulate at most [\d,]+ runs"):
        failures.simulate_conventional(TrainingRun(100_000, 1e-2, 1_000, 1.0), 0.1, 1, 0.0, 1_000_000, seed=0)
    with pytest.raises(NeverDone, match="more replicas"):
        failures.simulate_checkmate(LLAMA3, ShadowNodes(1, 1, 1.0, 10.0, 100.0), 0.0, 10, seed=0)
