"""What tests of several modules are given."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from checkmate.rpc.channels import OPTIONS
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow import locks
from tests.support.shadow.processes import NodeProcess, Start, start_in
from tests.support.shadow.recording_node import RecordingNode
from tests.support.shadow.world import World
from topologies import lab as labs


def pytest_configure() -> None:
    """Have the order of a shadow node's locks checked in all tests.

    A script's background jobs begin with SIGINT ignored, and would leave that to what tests interrupt.
    """
    locks.check_order(True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def name() -> Iterator[str]:
    """A lab's name that nobody else has; what a failed test leaves of it is removed."""
    unique = f"t{os.getpid()}_{random.randrange(10**6)}"
    yield unique
    labs.down(unique)


@pytest.fixture
def node() -> Iterator[RecordingNode]:
    """A shadow node that notes what trainers send it."""
    served = RecordingNode("127.0.0.1:0")
    yield served
    served.stop()


@pytest.fixture
def stub(node: RecordingNode) -> Iterator[ShadowStub]:
    """To speak with `node`."""
    with grpc.insecure_channel(node.address, options=OPTIONS) as channel:
        yield ShadowStub(channel)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """Makes shadow nodes with training and a switch that are played; all end with the test."""
    with ExitStack() as stack:
        yield lambda **kwargs: World(stack, **kwargs)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts shadow nodes as processes, which end with the test."""
    made: list[NodeProcess] = []
    yield start_in(tmp_path, made)
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker gets all tests that change, or look at, what processes of the whole machine share."""
    for item in items:
        reasons = " ".join(mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))
        if "namespace" in reasons or "tagger" in reasons:
            item.add_marker(pytest.mark.xdist_group("machine"))
