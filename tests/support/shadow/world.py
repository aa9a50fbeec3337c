"""Stubs and shadow nodes of a job in this process, with real gRPC and sockets, and a small training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from checkmate.job.schema import Job
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.calls.begin import node_status
from checkmate.shadow.process import Serving
from checkmate.shadow.resources import HoldResources
from testbed.copies import Copies, local_job
from testbed.small_training import RUN, START, SmallTraining
from tests.support.waiting import wait_until


class World:
    """A job's stubs, its shadow nodes in this process, and a training."""

    def __init__(self, stack: ExitStack, **kwargs: Any) -> None:
        self.job: Job = local_job(**kwargs)
        self._stack = stack
        self.copies = Copies(self.job)
        stack.callback(self.copies.close)
        self.nodes: dict[int, Serving] = {}
        for node in self.job.shadow_nodes:
            self.start(node.id)

    def start(self, node: int) -> None:
        serving = Serving(self.job, node, grace=0.5)
        serving.__enter__()
        self.nodes[node] = serving
        self._stack.callback(lambda: self.stop(node))

    def stop(self, node: int) -> None:
        if (serving := self.nodes.pop(node, None)) is not None:
            serving.__exit__()

    def training(self, **kwargs: Any) -> SmallTraining:
        training = SmallTraining(self.job, self.copies, **kwargs)
        self._stack.callback(training.close)
        return training

    def started(self, **kwargs: Any) -> SmallTraining:
        """Return a training whose nodes are connected and seeded."""
        training = self.training(**kwargs)
        training.begin(list(self.nodes))
        training.seed_all()
        self.ready()
        return training

    def status(self, node: int) -> pb.NodeStatus:
        return node_status(self.nodes[node].node, self.job.job)

    def ready(self, seconds: float = 60) -> None:
        """Wait until all holds are live and all of their streams are connected."""
        wait_until(lambda: all(map(self.is_ready, self.nodes)), "live", seconds)

    def is_ready(self, node: int) -> bool:
        return all(
            hold.live
            and all(
                self.copies.sends(
                    (stream.boundary, stream.channel, stream.shard),
                    stream.nic_ip,
                    group.begin.incarnation,
                )
                for stream in hold.plan.tagged_streams
            )
            for group, hold in self.nodes[node].node.state.holds
        )

    def resources(self, node: int = 0) -> HoldResources:
        """Return the resources of the first hold of a node."""
        return self.nodes[node].node.all_resources()[0]

    def stepped(self, iteration: int, seconds: float = 60) -> None:
        """Wait until all live holds have stepped an iteration."""
        wait_until(
            lambda: all(hold.stepped >= iteration for node in self.nodes for hold in self.status(node).holds),
            f"stepped {iteration}",
            seconds,
        )


def fence(here: World, training: SmallTraining) -> dict[int, pb.NodeStatus]:
    request = pb.FenceRequest(protocol=PROTOCOL, job=here.job.job, timeout=5)
    return {node: training.stubs[node].Fence(request, timeout=10) for node in here.nodes}


def settle(here: World, training: SmallTraining, iteration: int) -> dict[int, pb.NodeStatus]:
    request = pb.SettleRequest(job=here.job.job, iteration=iteration, run=RUN, continues=START)
    return {node: training.stubs[node].Settle(request, timeout=10) for node in here.nodes}


@contextmanager
def going_on(training: SmallTraining, *, seeds: bool = True) -> Iterator[None]:
    """Run iterations in the background."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.wait(0.02):
                training.iterate()
                if seeds:
                    training.send_requested_seeds()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def check_now(here: World, training: SmallTraining) -> None:
    """Check that every holder has the trainers' state after one more iteration, which is reserved before."""
    iteration = training.iteration + 1
    for node in here.nodes:
        request = pb.ReserveRequest(job=here.job.job, iteration=iteration, seconds=10)
        assert training.stubs[node].Reserve(request, timeout=5).granted
    training.iterate()
    here.stepped(iteration)
    for shard in range(here.job.shards(0)):
        for node in training.holders(shard):
            training.check(node, shard, iteration)
