"""Shadow nodes with real gRPC and real sockets, followed through small trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from checkmate.rpc import shadow_pb2 as pb
from checkmate.schema import Job
from checkmate.shadow.serve import Serving
from tests.end_hosts import needs_root, wait_until
from tests.small_training import RUN, Copies, Training, local_job

pytestmark = needs_root  # SO_RCVBUFFORCE


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

    def training(self, **kwargs: Any) -> Training:
        made = Training(self.job, self.copies, **kwargs)
        self._stack.callback(made.close)
        return made

    def started(self, **kwargs: Any) -> Training:
        """A training whose nodes are connected and seeded."""
        made = self.training(**kwargs)
        made.begin(list(self.nodes))
        made.seed_all()
        self.ready()
        return made

    def status(self, node: int) -> pb.NodeStatus:
        return self.nodes[node].node.status(self.job.job)

    def ready(self) -> None:
        wait_until(lambda: all(hold.live for node in self.nodes for hold in self.status(node).holds), "live")

    def stepped(self, iteration: int) -> None:
        """Wait until all live holds have stepped an iteration."""
        wait_until(
            lambda: all(hold.stepped >= iteration for node in self.nodes for hold in self.status(node).holds),
            f"stepped {iteration}",
        )


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:
        yield lambda **kwargs: World(stack, **kwargs)


@pytest.mark.parametrize(
    ("nodes", "ranks", "channels", "replicas"), [(1, 2, 1, 1), (2, 3, 2, 1), (3, 4, 1, 2), (2, 2, 2, 2)]
)
def test_every_iteration_is_the_trainers_own(
    world: Callable[..., World], nodes: int, ranks: int, channels: int, replicas: int
) -> None:
    here = world(nodes=nodes, ranks=ranks, channels=channels, replicas=replicas)
    training = here.started()
    for iteration in range(6):
        for node in here.nodes:
            reserved = training.stubs[node].Reserve(
                pb.ReserveRequest(job=here.job.job, iteration=iteration, seconds=10), timeout=5
            )
            assert reserved.granted
        assert training.iterate() == iteration
        here.stepped(iteration)
        for shard in range(here.job.shards(0)):
            for node in training.holders(shard):
                header = training.check(node, shard, iteration)
                assert [part.rng for part in header.record.parts] == [
                    b"rng %d of %d" % (iteration, position) for position in range(ranks)
                ]
    for node in here.nodes:
        assert [(hold.run, hold.trouble) for hold in here.status(node).holds] == [(RUN, "")] * replicas
