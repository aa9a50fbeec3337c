"""Shadow nodes under random events: whenever all are live again, their state is correct."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import pytest

from testbed.small_training import SmallTraining
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.world import World, check_now, fence, going_on, settle

pytestmark = needs_buffers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 12))])
def test_nodes_come_through_whatever_happens(seed: int) -> None:
    pick = random.Random(seed)
    nodes, replicas = pick.choice([(1, 1), (2, 1), (2, 2), (3, 2)])
    with ExitStack() as stack:
        ranks, channels = pick.choice([2, 3]), pick.choice([1, 2])
        here = World(stack, nodes=nodes, replicas=replicas, ranks=ranks, channels=channels)
        training = here.started()
        for _ in range(3):
            with going_on(training):
                for _ in range(pick.randint(1, 4)):
                    upset(here, training, pick)
                    time.sleep(pick.choice([0, 0.05, 0.3]))
                here.stepped(training.iteration + 5, 60)  # not possible after a gap
                here.ready(60)
            here.stepped(training.iteration)
            check_now(here, training)
            if pick.random() < 0.5:
                resume(here, training)


def upset(here: World, training: SmallTraining, pick: random.Random) -> None:
    """Apply an event to one node."""
    node = pick.choice(sorted(here.nodes))
    match pick.choice(["lose", "cut", "restart", "nothing"]):
        case "lose":
            here.copies.lose(node, pick.choice([1, 100, 5000]))
        case "cut":
            here.copies.disconnect(node)
        case "restart":
            here.stop(node)
            time.sleep(pick.choice([0, 0.2]))
            here.start(node)
            training.begin([node])


def resume(here: World, training: SmallTraining) -> None:
    """Restart training from the nodes' state."""
    last = training.iteration
    fence(here, training)
    settle(here, training, last)
    training.incarnation, training.first = training.incarnation + 1, last + 1
    training.begin(sorted(here.nodes), keep=True)
    here.ready()
    check_now(here, training)
