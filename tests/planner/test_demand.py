"""A job's demand: every byte at one NIC, memory as in real nodes, and supported optimizers."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.job.schema import Job
from checkmate.planner.demand import Demand, NodeDemand
from checkmate.planner.models.named import Model, load_model
from checkmate.planner.models.optimizers import NamedOptimizer, OptimizerError
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.hold_plans import hold_plans
from testbed.copies import local_job
from testbed.jobs import job
from testbed.measured_node import train_with_node
from tests.support.jobs import lists_of_jobs
from tests.support.planner import LINE, SIZES, demand, model
from tests.support.shadow.replicas import bytes_of_hold
from tests.support.shadow.world import World


@given(lists_of_jobs(most=1), SIZES)
def test_every_byte_of_an_iteration_comes_once_to_each_holder(jobs: list[Job], sizes: list[int]) -> None:
    (demo_job,) = jobs
    whole = model(*sizes)
    needs = demand(demo_job, whole)
    assert sum(nic.nbytes for nic in needs.nics) == whole.nbytes * len(demo_job.dp_groups) * demo_job.replicas
    of_shards = Counter(
        {node_demand.node: sum(shard.nbytes for shard in node_demand.shards) for node_demand in needs.nodes}
    )
    at_nics: Counter[int] = Counter()
    for nic in needs.nics:
        at_nics[nic.node] += nic.nbytes
        assert len(nic.round_bytes) == len(nic.peak_bits_per_s) == needs.rounds
        for nbytes, peak in zip(nic.round_bytes, nic.peak_bits_per_s, strict=True):
            assert (nbytes > 0) == (peak > 0)
            assert peak <= 2 * LINE * len(demo_job.dp_groups)
    assert at_nics == of_shards


@given(lists_of_jobs(most=1), SIZES)
def test_nccl_moves_as_many_bytes(jobs: list[Job], sizes: list[int]) -> None:
    (demo_job,) = jobs
    whole = model(*sizes)
    needs = demand(replace(demo_job, collective="nccl"), whole)
    assert sum(nic.nbytes for nic in needs.nics) == whole.nbytes * len(demo_job.dp_groups) * demo_job.replicas


@given(lists_of_jobs(most=1), SIZES)
def test_streams_are_as_long_as_shadow_nodes_expect(jobs: list[Job], sizes: list[int]) -> None:
    (demo_job,) = jobs
    needs = demand(demo_job, model(*sizes))
    lengths = [
        (layout := needs.layouts[plan.group])
        .slicing.stream(
            layout.schedule, plan.name, demo_job.channels, len(demo_job.dp_groups[plan.group].ranks)
        )
        .nbytes
        for node in demo_job.shadow_nodes
        for hold in hold_plans(demo_job, node.id)
        for plan in hold.streams
    ]
    assert needs.longest_stream == max(lengths)
    assert sum(lengths) == sum(nic.nbytes for nic in needs.nics)


@given(lists_of_jobs(most=1), SIZES)
def test_boundary_ranks_tag_all_once(jobs: list[Job], sizes: list[int]) -> None:
    (demo_job,) = jobs
    whole = model(*sizes)
    ranks = demand(demo_job, whole).boundary_ranks
    tagged_bytes = sum(rank.tagged_bytes for rank in ranks)
    assert tagged_bytes == whole.nbytes * len(demo_job.dp_groups)
    assert {rank.rank for rank in ranks} == {
        group.ranks[place].rank for group in demo_job.dp_groups for place in (0, -1)
    }
    assert not any(rank.repair_memory for rank in ranks)


def test_a_rank_keeps_four_iterations_for_repairs_or_64_mb_of_a_stream() -> None:
    large, small = (model(elements) for elements in (1 << 26, 1 << 20))
    for whole, iterations in ((large, 4), (small, 32)):
        first, last = demand(job(ranks=2, nodes=1, lossless=False), whole).boundary_ranks
        assert first.repair_memory == iterations * first.tagged_bytes
        assert last.tagged_bytes == whole.nbytes // 2


def test_two_nics_are_full_in_round_0_and_half_full_after() -> None:
    """The paper's section "Reassembling Buckets on Shadow Nodes"."""
    needs = demand(job(ranks=6, nics=2, channels=4), load_model("GPT3-XL"))
    for nic in needs.nics:
        assert nic.peak_bits_per_s == (LINE, LINE / 2, LINE / 2, LINE / 2, LINE / 2)


def test_groups_on_the_same_hosts_share_their_lines() -> None:
    whole = load_model("ResNet50")
    (apart,) = demand(job(groups=2, ranks=4, nics=1, channels=2), whole).nics
    (together,) = demand(job(groups=2, ranks=4, nics=1, channels=2, shared=True), whole).nics
    assert apart.peak_bits_per_s == (4 * LINE, 2 * LINE, 2 * LINE)
    assert together.peak_bits_per_s == (2 * LINE, LINE, LINE)
    assert together.round_bytes == apart.round_bytes


def test_one_nic_gets_two_lines_in_round_0() -> None:
    (nic,) = demand(job(ranks=4, nics=1, channels=2), load_model("ResNet50")).nics
    assert nic.peak_bits_per_s == (2 * LINE, LINE, LINE)


@given(SIZES, st.integers(1, 4), st.integers(1, 3))
def test_memory_adds_up(sizes: list[int], nodes: int, replicas: int) -> None:
    demo_job = job(nodes=nodes, replicas=min(nodes, replicas), channels=2)
    whole = model(*sizes)
    memories = [shadow_node.memory for shadow_node in demand(demo_job, whole).nodes]
    parameter_bytes = demo_job.replicas * whole.nbytes
    assert sum(memory.parameters for memory in memories) == parameter_bytes
    assert sum(memory.optimizer_state for memory in memories) == 2 * parameter_bytes
    assert sum(memory.gradients for memory in memories) == 2 * parameter_bytes
    streams = 2 * 2 * demo_job.shards(0) * demo_job.replicas
    assert sum(memory.socket_buffers for memory in memories) == 2 * RECEIVE_BUFFER * streams


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exit_stack:
        yield exit_stack


def test_shadow_nodes_take_the_memory_that_was_planned(stack: ExitStack) -> None:
    """Measure replicas and sets of buckets of real nodes."""
    here = World(stack, nodes=3, ranks=2, replicas=2, channels=2)
    shapes = ((64, 320), (64,), (4000,), (12, 70), (7,))
    training = here.started(shapes=shapes)
    for iteration in range(3):
        training.iterate()
        here.stepped(iteration)
    whole = Model("trained", training.layout.parameters)
    optimizer = NamedOptimizer(type(training.optimizer).__name__ + options(training.optimizer))
    for planned in Demand(here.job, (whole,), optimizer, LINE, RECEIVE_BUFFER).nodes:
        real = here.nodes[planned.node].node
        nbytes = sum(bytes_of_hold(resources) for resources in real.all_resources())
        assert nbytes == pytest.approx(planned.memory.process, rel=0.01)
        assert sum(nic.streams for nic in planned.nics) == sum(
            len(resources.inlets) for resources in real.all_resources()
        )


def options(optimizer: torch.optim.Optimizer) -> str:
    return f",momentum={optimizer.defaults['momentum']}" if optimizer.defaults.get("momentum") else ""


@pytest.mark.parametrize(
    ("text", "dtype", "nbytes"),
    [
        ("adamw", "float32", 8),
        ("Adam,amsgrad=true", "float32", 12),
        ("adamw", "bfloat16", 4),
        ("sgd", "float32", 0),
        ("SGD,momentum=0.9", "float64", 8),
        ("adagrad", "float32", 4),
    ],
)
def test_an_optimizer_keeps_so_much_state(text: str, dtype: str, nbytes: int) -> None:
    assert NamedOptimizer(text).state_bytes(dtype) == nbytes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lbfgs", "LBFGS can't be followed, nor its state be copied"),
        ("sgd,momentum", "option momentum has no value"),
        ("sgd,momentum=much", "much is not a number"),
        ("sgd,momentum=1e400", "1e400 is not a finite number"),
        ("sgd,lr=nan", "nan is not a finite number"),
        ("adamw,betas=0.9", "option betas takes 2 numbers, which is not supported"),
        ("sgd,momentum=none", "option momentum takes a number, not None"),
        ("adamw,momentum=0.9", "unexpected keyword"),
        ("adamw,lr=-1", "Invalid learning rate"),
        ("adamw,capturable=true", "capturable"),
    ],
)
def test_an_optimizer_that_cannot_be_followed_is_refused(text: str, why: str) -> None:
    with pytest.raises(OptimizerError, match=why):
        NamedOptimizer(text)


def test_nodes_are_in_order() -> None:
    nodes: tuple[NodeDemand, ...] = demand(job(nodes=3), model(5, 5, 5)).nodes
    assert [shadow_node.node for shadow_node in nodes] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for receive buffers")
def test_a_shadow_nodes_process_takes_what_was_planned() -> None:
    """Return resident memory beyond that of an empty node, over some iterations."""
    planned_job = local_job(nodes=1, ranks=2)
    training, empty, peaks = train_with_node(planned_job)
    process_bytes = [peak - empty for peak in peaks]
    optimizer = NamedOptimizer(type(training.optimizer).__name__ + options(training.optimizer))
    model = Model("trained", training.layout.parameters)
    (planned,) = Demand(planned_job, (model,), optimizer, LINE, RECEIVE_BUFFER).nodes
    assert statistics.median(process_bytes) == pytest.approx(planned.memory.process, rel=0.15)
