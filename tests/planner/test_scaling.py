"""Step times over cores and nodes, the number of nodes of a model, and profile files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.cli.common import out
from checkmate.cli.planning.profile import _print
from checkmate.planner.demand import Demand
from checkmate.planner.models.named import Model, load_model
from checkmate.planner.profile.sizing import Machine, memory_of, sizing, sizings
from checkmate.planner.profile.tables import figures, measured
from checkmate.planner.scaling import (
    Profile,
    ProfileError,
    StepTimes,
    amdahl,
    curve,
    largest_share,
    outliers,
    predicted,
    read_profile,
)
from checkmate.planner.units import NODES_MAX
from checkmate.wire.parameter import Parameter
from testbed.jobs import job
from tests.support.planner import ADAMW, TINY, model_by_name, times

COUNTS = st.lists(st.integers(1, 64), min_size=2, max_size=6, unique=True).map(sorted)


@given(COUNTS, st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_amdahls_law_is_found_again(counts: list[int], fixed: float, shared: float) -> None:
    measured = {n: fixed + shared / n for n in counts}
    assert amdahl(measured) == pytest.approx((fixed, shared), rel=1e-3, abs=1e-4)
    step_times = times(measured)
    for cores in (*counts, 0.5 * (counts[0] + counts[1]), counts[-1] + 1, 4 * counts[-1]):
        assert step_times.on(cores) == pytest.approx(fixed + shared / cores, rel=1e-3)


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-3, 10), min_size=1, max_size=6), st.floats(0.5, 200))
def test_whatever_was_measured_more_cores_are_never_worse(seconds: dict[int, float], cores: float) -> None:
    step_times = times(dict(sorted(seconds.items())))
    for n in seconds:
        assert step_times.on(n) == min(took for m, took in seconds.items() if m <= n)
    assert step_times.on(2 * cores) <= step_times.on(cores) * (1 + 1e-9)
    assert 0 < step_times.on(cores) <= max(seconds.values()) * max(1, min(seconds) / cores) * (1 + 1e-9)
    assert min(amdahl(step_times.seconds)) >= 0


def test_one_measurement_promises_nothing_of_more_cores() -> None:
    assert times({4: 2.0}).on(28) == 2.0
    assert times({4: 2.0}).on(1) == 8.0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 16))
def test_the_fullest_node_decides(sizes: list[int], nodes: int) -> None:
    model = Model("m", tuple(Parameter(f"p{i}", (n,), "float32") for i, n in enumerate(sizes)))
    share = largest_share(model, nodes)
    assert 1 / nodes - 1e-9 <= share <= 1
    assert share * sum(sizes) >= max(sizes) - 1e-6
    measured = times({1: 3.0, 4: 1.0}, sum(sizes))
    assert predicted(measured, model, nodes, 4) == pytest.approx(share)


def test_the_curve_adds_a_node_for_every_so_many_cores() -> None:
    model = load_model(TINY)
    points = curve(times({1: 4.0, 2: 2.0}), model, 2, 3)
    assert [cores for cores, _ in points] == [1, 2, 3, 4, 5, 6]
    assert [seconds for _, seconds in points] == pytest.approx([4 / n for n in range(1, 7)])


def test_the_papers_gpt3_needs_one_node() -> None:
    """6 s with one core, 500 ms with 28; an iteration of batch 4 takes more than 2 s (the paper)."""
    model = load_model("GPT3-6.7B")
    measured = StepTimes("GPT3-6.7B", "AdamW", "bfloat16", model.elements, {1: 6.0, 28: 0.5}, by_layer=False)
    node = Machine(28, 10**12, 25e9)
    sized, enough = sizings(model, ADAMW, measured, node, 2.0)
    assert enough is not None
    assert enough.nodes == 1
    assert [s.nodes for s in sized] == [1, 2, 3, 4]
    assert sized[1].step_seconds == pytest.approx(0.25, rel=0.02)
    assert sized[3].step_seconds == pytest.approx(0.125, rel=0.04)


@settings(max_examples=40)
@given(
    st.floats(0.01, 20), st.floats(1e9, 1e12), st.floats(1e8, 1e12), st.sampled_from(["GPT3-XL", "ResNet50"])
)
def test_the_number_of_nodes_is_the_fewest(iteration: float, memory: float, rate: float, name: str) -> None:
    model = model_by_name(name)
    node = Machine(4, int(memory), rate)
    sized, enough = sizings(model, ADAMW, times({1: 6.0, 4: 2.0}, model.elements), node, iteration)
    fitting = [s.nodes for s in sized if not s.short_of]
    assert (enough.nodes if enough else None) == (fitting[0] if fitting else None)
    if enough is None:
        assert len(sized) == NODES_MAX
    for node_sizing in sized:
        assert ("step" in node_sizing.short_of) == (node_sizing.step_seconds > iteration)
        assert ("memory" in node_sizing.short_of) == (node_sizing.memory_bytes > int(memory))


def test_memory_is_that_of_a_plan() -> None:
    model = load_model("ResNet50")
    (node,) = Demand(job(nodes=1), (model,), ADAMW, 1e11, 1).nodes
    assert memory_of(model, ADAMW) == node.memory.total - node.memory.socket_buffers


@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_each_nodes_memory_is_that_of_a_plan_sockets_too(nodes: int, channels: int) -> None:
    model = model_by_name("ResNet50")
    planned_job = job(nodes=nodes, channels=channels)
    planned = Demand(planned_job, (model,), ADAMW, 1e11, 8 << 20).nodes
    machine = Machine(4, 10**12, 1e9, channels, 8 << 20)
    node_sizing = sizing(model, ADAMW, times({1: 1.0}), machine, nodes, None)
    assert node_sizing.memory_bytes == max(node.memory.total for node in planned)
    assert {node.memory.socket_buffers for node in planned} == {node_sizing.socket_bytes}


@given(
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.dictionaries(st.integers(1, 64), st.floats(0.97, 1.03), min_size=1, max_size=8),
)
def test_what_follows_amdahl_has_no_outlier(fixed: float, shared: float, noise: dict[int, float]) -> None:
    assert not outliers({n: (fixed + shared / n) * off for n, off in sorted(noise.items())})


@pytest.mark.parametrize(
    ("seconds", "odd"),
    [
        ({1: 4.0, 2: 9.0, 4: 1.2}, {2: "slower than with 1"}),
        ({1: 4.0, 2: 2.1, 4: 2.5}, {4: "slower than with 2"}),
        ({1: 9.0, 2: 2.1, 4: 1.1}, {1: "slow beside 2"}),
        ({1: 4.0}, {}),
        ({2: 4.0, 4: 4.2, 8: 3.9}, {}),
    ],
)
def test_a_figure_that_the_others_contradict_is_an_outlier(
    seconds: dict[int, float], odd: dict[int, str]
) -> None:
    assert outliers(seconds) == odd


def test_outliers_are_marked_where_figures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    step = StepTimes("a[red]:b", "AdamW", "float32", 1000, {1: 4.0, 2: 9.0, 4: 1.2}, by_layer=False)
    figures_shown = figures(Profile(4, {1: 2e9, 2: 1e9}, (step,)))
    assert [(figure.parts, figure.outlier) for figure in figures_shown if figure.outlier] == [
        ("2 NICs", "slower than with 1"),
        ("2 threads", "slower than with 1"),
    ]
    out.print(measured(figures_shown), markup=False)
    rows = [row for row in capsys.readouterr().out.splitlines() if "slower than with 1" in row]
    assert len(rows) == 2
    assert "AdamW step of a[red]:b" in rows[1]
    _print(Profile(4, {1: 2e9, 2: 1e9}, (step,)), [], True, None)
    assert "busy or has too few cores" in capsys.readouterr().err
    out.print(measured(figures(Profile(4, {1: 2e9}, ()))), markup=False)
    assert "outlier" not in capsys.readouterr().out


def test_a_profile_of_another_optimizer_is_refused() -> None:
    profile = Profile(1, {1: 1e9}, (times({1: 1.0}),))
    with pytest.raises(ProfileError, match="no step of SGD in float32; it has m, AdamW, float32"):
        profile.steps_of(load_model(TINY), "SGD")
    assert profile.steps_of(load_model(TINY), "AdamW").model == "m"


WRONG: list[tuple[tuple[Any, ...], object]] = [
    (("cores",), 0),
    (("cores",), math.inf),
    (("receive_bytes_per_s", "1"), 0),
    (("receive_bytes_per_s", "1"), math.nan),
    (("receive_bytes_per_s", "0"), 1e9),
    (("steps", 0, "elements"), 0),
    (("steps", 0, "seconds", "1"), math.nan),
    (("steps", 0, "seconds", "8"), math.inf),
    (("steps", 0, "seconds", "8"), 1e-320),
    (("steps", 0, "seconds", "0"), 1.0),
]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = Profile(8, {1: 1.5e9, 2: 2e9}, (times({1: 1.0, 8: 0.25}),))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(asdict(profile)))
    assert read_profile(file) == profile
    for path, wrong_value in WRONG:
        document = json.loads(json.dumps(asdict(profile)))
        *way, last = path
        at = document
        for key in way:
            at = at[key]
        at[last] = wrong_value
        file.write_text(json.dumps(document))
        with pytest.raises(ProfileError, match="is not a profile.*; create one"):
            read_profile(file)
    for wrong in ("[]", "{}", '{"steps": [], "cores": 1, "receive_bytes_per_s": {}}', "no"):
        file.write_text(wrong)
        with pytest.raises(ProfileError, match="is not a profile.*; create one"):
            read_profile(file)
