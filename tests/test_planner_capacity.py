"""What doesn't fit is found, and the change that is named does make it fit; and the command that says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.parts import Fault
from checkmate.schema import Job
from planner.capacity import Capacity, Limits, SwitchUse
from planner.changes import serving, widened, with_nic
from planner.demand import Demand
from planner.misfits import misfits
from planner.models import Model, load_model, stages_of
from planner.scaling import StepTimes
from tests.jobs_made import job, job_data
from tests.planner_made import LINE, demand, model
from tests.test_cli import invoke


def capacity(found: Demand, **limits: Any) -> Capacity:
    return Capacity(found, Limits(**{"nic_bits_per_s": LINE, **limits}), ())


def faults(found: Capacity) -> list[Fault]:
    return misfits(found, lambda _: ())


def with_job(found: Capacity, made: Job) -> Capacity:
    return replace(found, demand=replace(found.demand, job=made))


def test_the_papers_256_ports() -> None:
    found = capacity(demand(job(groups=128, ranks=2), model(100)))
    assert found.ports_of_the_rule == 256


def test_what_fits_has_no_fault() -> None:
    found = capacity(
        demand(job(nodes=2, channels=2), load_model("GPT3-XL")),
        iteration_s=1.0,
        node_memory=64 * 10**9,
        cores=28,
        steps=(steps(load_model("GPT3-XL"), {28: 0.3}),),
    )
    assert faults(found) == []
    assert found.unchecked == []


def steps(of: Model, seconds: dict[int, float]) -> StepTimes:
    return StepTimes(of.name, "AdamW", "bfloat16", of.elements, seconds, by_layer=False)


def test_a_second_nic_makes_the_line_enough() -> None:
    found = capacity(demand(job(nics=1, channels=2), load_model("ResNet50")))
    (fault,) = faults(found)
    assert fault.path == ("shadow_nodes", 0, "nics", 0)
    assert "gets up to 200 Gbit/s at once in round 0 of the ring, and its line has 100" in fault.message
    assert fault.message.endswith("it would fit with a second NIC, or with NICs of 200 Gbit/s")
    assert not faults(with_job(found, with_nic(found.demand.job, 0)))


def test_fewer_dp_groups_on_a_node_make_the_line_enough() -> None:
    stages = stages_of(load_model("LLaMA2-7B"), 2)
    found = capacity(demand(job(groups=2, nodes=2, channels=4), *stages))
    (fault,) = faults(found)
    assert "the worst of 4 NICs" in fault.message
    assert "1 DP group instead of 2 on it" in fault.message
    apart = serving(found.demand.job, 0, 1)
    assert not [
        nic for nic in with_job(found, apart).demand.nics if nic.node == 0 and max(nic.peak_bits_per_s) > LINE
    ]


@settings(max_examples=30)
@given(st.integers(1, 3), st.sampled_from(["memory", "step", "receive"]), st.floats(0.02, 0.9))
def test_the_number_of_more_nodes_is_the_smallest(nodes: int, what: str, part: float) -> None:
    whole = model(*[1000] * 48)
    start = capacity(demand(job(nodes=nodes, nics=2, channels=2), whole))
    first = start.demand.nodes[0]
    choices: dict[str, dict[str, Any]] = {
        "memory": {"node_memory": int(first.memory.total * part)},
        "step": {"iteration_s": part / nodes, "cores": 1, "steps": (steps(whole, {1: 1.0}),)},
        "receive": {"iteration_s": max(map(start.receive_seconds, start.demand.nics)) * part},
    }
    found = capacity(start.demand, **choices[what])
    said = [fault.message for fault in faults(found)]
    assert len(said) == 1
    more = [n for n in range(1, 17 - nodes) if f"{n} more shadow node" in said[0]]
    if not more:
        assert faults(with_job(found, widened(found.demand.job, 0, 16 - nodes)))
        return
    fewest = max(more)  # "11 more" has "1 more" in it
    assert not faults(with_job(found, widened(found.demand.job, 0, fewest)))
    assert fewest == 1 or faults(with_job(found, widened(found.demand.job, 0, fewest - 1)))


def test_a_stream_of_more_than_2_gb_needs_more_channels() -> None:
    found = capacity(demand(job(nics=2, ranks=8), load_model("LLaMA2-13B")))
    (fault,) = faults(found)
    assert fault.path == ("channels",)
    assert "an iteration of one stream has 22.78 GB" in fault.message
    assert "more shadow nodes like it" in fault.message  # 8 channels alone leave 2.85 GB
    assert "channels, or" not in fault.message
    eight = capacity(demand(job(nics=2, ranks=8), load_model("GPT3-XL", "float32")))
    (fault,) = faults(eight)
    assert "it would fit with 3 channels" in fault.message
    assert not faults(with_job(eight, eight.demand.job.model_copy(update={"channels": 3})))


def test_a_slower_measured_receiver_counts() -> None:
    found = demand(job(channels=2), load_model("GPT3-XL"))
    line = capacity(found, iteration_s=0.2)
    assert not faults(line)
    slow = capacity(found, iteration_s=0.2, receive_bytes_per_s={1: 1e9, 2: 1.6e9})
    assert slow.receive_rate(0) == 0.8e9
    (fault,) = faults(slow)
    assert "takes 1.64 s for the 1.32 GB" in fault.message


def test_a_full_table_names_the_most_channels_that_fit() -> None:
    made = job(channels=8)

    def uses(channels: int) -> list[SwitchUse]:
        targets = {"bmv2": {"streams": 35}, "tofino": {"streams": 80}, "tofino2": {"streams": 79}}
        return [SwitchUse("tor0", "bmv2", {"streams": 10 * channels}, targets, 2, 2)]

    found = Capacity(demand(made, model(1000)), Limits(LINE), tuple(uses(8)))
    (fault,) = misfits(found, uses)
    assert fault.message == (
        "80 streams needed on switch tor0 (bmv2), which holds 35; "
        "it would fit with at most 3 channels, or with a tofino"
    )


def test_steps_of_several_shards_add_up() -> None:
    whole = load_model("GPT3-XL")
    found = capacity(
        demand(job(nodes=2, replicas=2, channels=2), whole), cores=2, steps=(steps(whole, {2: 3.0}),)
    )
    taken = [found.step_seconds(one) for one in found.demand.nodes]
    assert taken == pytest.approx([3.0, 3.0])


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=2, channels=2, ranks=4)))
    return file


def test_the_command_says_that_it_fits(job_file: Path) -> None:
    line: list[str | Path] = ["plan", job_file, "--capacity", "--model", "gpt3-xl", "--json"]
    code, output = invoke(*line)
    assert code == 0
    said = json.loads(output[output.index("{\n") :])
    assert said["fits"]
    assert said["models"] == [
        {"name": "GPT3-XL", "parameters": 1_315_723_264, "bytes": 2_631_446_528, "dtype": "bfloat16"}
    ]
    assert sum(nic["bytes"] for nic in said["nics"]) == 2_631_446_528
    assert (said["shadow_nics"], said["switch_ports"], said["transceivers"]) == (4, 4, 8)
    assert said["ports_of_the_rule"] == 2
    assert said["streams"] == said["switches"][0]["used"]["streams"] == 8
    assert len(said["not_checked"]) == 2
    assert [len(nic["rounds"]) for nic in said["nics"]] == [3] * 4


def test_the_command_ends_with_2_and_the_whole_plan_where_something_does_not_fit(job_file: Path) -> None:
    line: list[str | Path] = ["plan", job_file, "--capacity", "--model", "LLaMA2-7B"]
    code, output = invoke(*line, "--iteration-time", "100ms", "--node-memory", "16GB", "--json")
    assert code == 2
    said = json.loads(next(text for text in output.splitlines() if text.startswith("{")))
    assert not said["capacity"]["fits"]
    assert [fault["message"] for fault in said["faults"]] == [
        misfit["message"] for misfit in said["capacity"]["misfits"]
    ]
    assert [fault["path"] for fault in said["faults"]] == [
        "channels",
        "shadow_nodes[0].nics[0]",
        "shadow_nodes[0]",
    ]
    assert all("more shadow node" in fault["message"] for fault in said["faults"])
    code, output = invoke(*line, "--iteration-time", "100ms", "--node-memory", "16GB")
    assert code == 2
    assert "shadow nodes: memory" in output
    assert f"{job_file}:" in output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "--capacity needs --model"),
        (["--model", "GPT9"], "no model GPT9"),
        (["--model", "ResNet50", "--model", "ResNet50"], "--model is given 2 times; job demo has 1"),
        (["--model", "ResNet50", "--optimizer", "adamx"], "no optimizer adamx"),
        (["--model", "ResNet50", "--dtype", "int8"], "no type int8"),
        (["--model", "ResNet50", "--iteration-time", "1"], "--iteration-time must be a time such as"),
        (["--model", "ResNet50", "--iteration-time", "0s"], "--iteration-time must be more than 0"),
        (["--model", "ResNet50", "--link-rate", "100GB/s"], "--link-rate must be a line's rate"),
        (["--model", "ResNet50", "--node-memory", "128"], "--node-memory must be a size"),
        (["--model", "ResNet50", "--cores", "4"], "give --profile"),
        (["--model", "ResNet50", "--profile", "/nowhere"], "/nowhere can't be read"),
        (["--model", "ResNet50", "--profile", "/etc/hostname"], "is no profile; make one"),
    ],
)
def test_nonsense_is_refused_by_name(job_file: Path, line: list[str], said: str) -> None:
    code, output = invoke("plan", job_file, "--capacity", *line)
    assert code == 2
    assert said in " ".join(output.split())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "ResNet50"),
        ("--optimizer", "adamw"),
        ("--dtype", "float32"),
        ("--iteration-time", "1s"),
        ("--link-rate", "100Gbit/s"),
        ("--nic-rate", "100Gbit/s"),
        ("--node-memory", "1GB"),
        ("--profile", "x.json"),
        ("--cores", "4"),
        ("--receive-buffer", "64"),
    ],
)
def test_options_of_capacity_are_refused_without_it(job_file: Path, option: str, value: str) -> None:
    code, output = invoke("plan", job_file, option, value)
    assert code == 2
    assert f"{option} goes with --capacity" in output


@pytest.mark.parametrize(
    "line",
    [
        ["--capacity", "--pfc"],
        ["--capacity", "--bfrt"],
        ["--capacity", "--entries"],
        ["--pfc", "--bfrt"],
        ["--pfc", "--entries"],
        ["--bfrt", "--entries"],
    ],
)
def test_what_cannot_be_done_together_is_refused(job_file: Path, line: list[str]) -> None:
    code, output = invoke("plan", job_file, *reversed(line))
    assert code == 2
    assert f"{line[0]} and {line[1]} can't be done together" in output
    code, output = invoke("plan", job_file, "--capacity", "--model", "ResNet50", "--switch", "tor0")
    assert code == 2
    assert "--switch goes with --pfc or --bfrt" in output


def test_what_a_user_wrote_is_told_as_it_is(job_file: Path) -> None:
    for name in ("..:x:", r"a:b\[red]:sob:"):
        code, output = invoke("plan", job_file, "--capacity", "--model", name)
        assert code == 2
        assert f"model {name}:" in output


def test_two_jobs_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(job_data(f"job{number}", number=number)))
    code, output = invoke("plan", tmp_path, "--capacity", "--model", "ResNet50")
    assert code == 2
    assert "--capacity plans one job with its model, not 2" in " ".join(output.split())
