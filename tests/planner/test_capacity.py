"""Resources that do not suffice are found, and the proposed changes fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job.faults import Fault
from checkmate.job.schema import Job
from checkmate.planner.capacity.misfits import add_nodes, checks, limit_groups, with_nic
from checkmate.planner.capacity.plan import Capacity, CapacityLimits, SwitchUse
from checkmate.planner.demand import Demand
from checkmate.planner.models.named import Model, load_model, stages_of
from checkmate.planner.scaling import StepTimes
from testbed.jobs import job
from tests.support.planner import LINE, demand, model


def capacity(needed_resources: Demand, **limits: Any) -> Capacity:
    return Capacity(needed_resources, CapacityLimits(**{"nic_bits_per_s": LINE, **limits}), ())


def faults(planned: Capacity) -> list[Fault]:
    return [check.misfit for check in checks(planned, lambda _: ()) if check.misfit]


def with_job(planned: Capacity, changed_job: Job) -> Capacity:
    return replace(planned, demand=replace(planned.demand, job=changed_job))


def test_the_papers_256_ports() -> None:
    planned = capacity(demand(job(groups=128, ranks=2), model(100)))
    assert planned.ports_of_the_rule == 256


def test_what_fits_has_no_fault() -> None:
    planned = capacity(
        demand(job(nodes=2, channels=2), load_model("GPT3-XL")),
        iteration_s=1.0,
        node_memory=64 * 10**9,
        cores=28,
        steps=(steps(load_model("GPT3-XL"), {28: 0.3}),),
    )
    assert faults(planned) == []
    assert planned.unchecked == []


def steps(of: Model, seconds: dict[int, float]) -> StepTimes:
    return StepTimes(of.name, "AdamW", "bfloat16", of.elements, seconds, by_layer=False)


def test_a_second_nic_makes_the_line_enough() -> None:
    planned = capacity(demand(job(nics=1, channels=2), load_model("ResNet50")))
    (fault,) = faults(planned)
    assert fault.path == ("shadow_nodes", 0, "nics", 0)
    assert "receives up to 200 Gbit/s in round 0 of the ring, but its line rate is 100" in fault.message
    assert fault.message.endswith("it would fit with a second NIC, or with NICs of 200 Gbit/s")
    assert not faults(with_job(planned, with_nic(planned.demand.job, 0)))


def test_fewer_dp_groups_on_a_node_make_the_line_enough() -> None:
    stages = stages_of(load_model("LLaMA2-7B"), 2)
    planned = capacity(demand(job(groups=2, nodes=2, channels=4), *stages))
    (fault,) = faults(planned)
    assert "the worst of 4 NICs" in fault.message
    assert "1 DP group instead of 2 on it" in fault.message
    apart = limit_groups(planned.demand.job, 0, 1)
    assert not [
        nic
        for nic in with_job(planned, apart).demand.nics
        if nic.node == 0 and max(nic.peak_bits_per_s) > LINE
    ]


@settings(max_examples=30)
@given(st.integers(1, 3), st.sampled_from(["memory", "step", "receive"]), st.floats(0.02, 0.9))
def test_the_number_of_more_nodes_is_the_smallest(nodes: int, choice: str, part: float) -> None:
    whole = model(*[1000] * 48)
    start = capacity(demand(job(nodes=nodes, nics=2, channels=2), whole))
    first = start.demand.nodes[0]
    choices: dict[str, dict[str, Any]] = {
        "memory": {"node_memory": int(first.memory.total * part)},
        "step": {"iteration_s": part / nodes, "cores": 1, "steps": (steps(whole, {1: 1.0}),)},
        "receive": {"iteration_s": max(map(start.receive_seconds, start.demand.nics)) * part},
    }
    planned = capacity(start.demand, **choices[choice])
    messages = [fault.message for fault in faults(planned)]
    assert len(messages) == 1
    more = [n for n in range(1, 17 - nodes) if f"{n} more shadow node" in messages[0]]
    if not more:
        assert faults(with_job(planned, add_nodes(planned.demand.job, 0, 16 - nodes)))
        return
    fewest = max(more)  # "11 more" has "1 more" in it
    assert not faults(with_job(planned, add_nodes(planned.demand.job, 0, fewest)))
    assert fewest == 1 or faults(with_job(planned, add_nodes(planned.demand.job, 0, fewest - 1)))


def test_a_stream_of_more_than_2_gb_needs_more_channels() -> None:
    planned = capacity(demand(job(nics=2, ranks=8), load_model("LLaMA2-13B")))
    (fault,) = faults(planned)
    assert fault.path == ("channels",)
    assert "an iteration of one stream has 22.78 GB" in fault.message
    assert "more shadow nodes like it" in fault.message  # 8 channels alone leave 2.85 GB
    assert "channels, or" not in fault.message
    eight = capacity(demand(job(nics=2, ranks=8), load_model("GPT3-XL", "float32")))
    (fault,) = faults(eight)
    assert "it would fit with 3 channels" in fault.message
    assert not faults(with_job(eight, replace(eight.demand.job, channels=3)))


@settings(max_examples=30)
@given(st.integers(10**6, 10**12))
def test_the_memory_that_is_named_is_enough(elements: int) -> None:
    planned = capacity(demand(job(channels=8), model(elements)), node_memory=1)
    (message,) = (fault.message for fault in faults(planned) if "GB and has" in fault.message)
    enough = float(message.rsplit("nodes of ", 1)[1].removesuffix(" GB")) * 1e9
    largest = max(node.memory.total for node in planned.demand.nodes)
    assert largest * (1 - 1e-9) <= enough < largest * 1.01
    assert not [
        f for f in faults(capacity(planned.demand, node_memory=int(enough))) if "GB and has" in f.message
    ]


def test_a_slower_measured_receiver_counts() -> None:
    needs = demand(job(channels=2), load_model("GPT3-XL"))
    line = capacity(needs, iteration_s=0.2)
    assert not faults(line)
    slow = capacity(needs, iteration_s=0.2, receive_bytes_per_s={1: 1e9, 2: 1.6e9})
    assert slow.receive_rate(0) == 0.8e9
    (fault,) = faults(slow)
    assert "takes 1.64 s for the 1.32 GB" in fault.message


def test_a_full_table_names_the_most_channels_that_fit() -> None:
    demo_job = job(channels=8)

    def uses(channels: int) -> list[SwitchUse]:
        targets = {"bmv2": {"streams": 35}, "tofino": {"streams": 80}, "tofino2": {"streams": 79}}
        return [SwitchUse("tor0", "bmv2", {"streams": 10 * channels}, targets, 2, 2)]

    planned = Capacity(demand(demo_job, model(1000)), CapacityLimits(LINE), tuple(uses(8)))
    (fault,) = (check.misfit for check in checks(planned, uses) if check.misfit)
    assert fault.message == (
        "80 streams needed on switch tor0 (bmv2), which has room for 35; "
        "it would fit with at most 3 channels, or with a tofino"
    )


def test_steps_of_several_shards_add_up() -> None:
    whole = load_model("GPT3-XL")
    planned = capacity(
        demand(job(nodes=2, replicas=2, channels=2), whole), cores=2, steps=(steps(whole, {2: 3.0}),)
    )
    seconds = [planned.step_seconds(shadow_node) for shadow_node in planned.demand.nodes]
    assert seconds == pytest.approx([3.0, 3.0])


@given(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.5, 2))
def test_what_does_not_fit_is_what_is_needed_more_than_there_is(
    line: float, memory: float, time: float
) -> None:
    start = capacity(demand(job(nodes=2, channels=2), model(*[1000] * 48)))
    planned = capacity(
        start.demand,
        nic_bits_per_s=LINE * line,
        node_memory=int(start.demand.nodes[0].memory.total * memory),
        iteration_s=max(map(start.receive_seconds, start.demand.nics)) * time,
    )
    for check in checks(planned, lambda _: ()):
        assert (check.misfit is not None) == (check.share > 1 + 1e-9)
        assert (check.change != "") == (check.misfit is not None)
