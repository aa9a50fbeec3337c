"""Fixtures for tests of several folders."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from hypothesis import settings

from checkmate.keys.access import INSECURE
from checkmate.rpc.channels import OPTIONS
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow import locks
from tests.support import own_cache, terminated
from tests.support.shadow.checked_locks import CheckedLock
from tests.support.shadow.processes import NodeProcess, Start, start_in
from tests.support.shadow.recording_node import RecordingNode
from tests.support.shadow.world import World
from tests.support.training.rank_processes import RankProcesses
from topologies import lab as labs


def pytest_configure(config: pytest.Config) -> None:
    """Have the order of a shadow node's locks checked in all tests, and use no keys unless a test does.

    Background jobs of a script start with SIGINT ignored, which processes that tests interrupt would inherit.
    """
    settings.register_profile("checkmate", deadline=None)  # other work may hold the machine
    settings.load_profile("checkmate")
    locks.ordered_lock = CheckedLock  # type: ignore[assignment]
    os.environ[INSECURE] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # else each process that tests start compiles everything
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    own_cache.pytest_configure(config)
    terminated.pytest_configure()


@pytest.fixture
def name() -> Iterator[str]:
    """Yield a unique name for a lab; remove the lab if a failed test leaves it."""
    unique = f"t{os.getpid()}_{random.randrange(10**6)}"
    yield unique
    labs.down(unique)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Yield processes that run functions as the ranks of a process group."""
    with RankProcesses() as processes:
        yield processes


@pytest.fixture
def node() -> Iterator[RecordingNode]:
    """Yield a shadow node that records the messages of trainers."""
    served = RecordingNode()
    yield served
    served.stop()


@pytest.fixture
def stub(node: RecordingNode) -> Iterator[ShadowStub]:
    """Yield a stub for calls of `node`."""
    with grpc.insecure_channel(node.address, options=OPTIONS) as channel:
        yield ShadowStub(channel)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """Yield a function that creates shadow nodes with emulated training and switch; all end with the test."""
    with ExitStack() as stack:
        yield lambda **kwargs: World(stack, **kwargs)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts shadow nodes as processes, which end with the test."""
    processes: list[NodeProcess] = []
    yield start_in(tmp_path, processes)
    for process in processes:
        process.process.kill()
        process.process.communicate()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group all tests that change or inspect state of the whole machine in one worker; lint comes first.

    mypy takes a minute on a new machine: at the end, the other workers would wait for it.
    """
    items.sort(key=lambda item: item.path.name != "test_lint.py")
    for item in items:
        reasons = " ".join(mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))
        if "namespace" in reasons or "tagger" in reasons:
            item.add_marker(pytest.mark.xdist_group("machine"))
