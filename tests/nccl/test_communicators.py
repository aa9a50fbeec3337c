"""Which communicators use the plugin, and through which versions of NCCL's interfaces."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from checkmate.nccl.building import shared_object
from checkmate.nccl.library import NcclBucket, NcclLibrary, NcclPlace
from checkmate.wire.nccl_slicing import NcclSlicing
from tests.support.nccl.calls import RELEASES, Caller, Versions
from tests.support.nccl.sender import ANOTHER, JOB_COMM_HASH, LOOPBACK, SendingRank, address

Make = Callable[..., SendingRank]


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_s_interfaces_lead_to_the_same_tags(make: Make, release: str) -> None:
    sender = make(release, 2, 3, 2)
    bucket = NcclBucket(address(0), 100_000, 4, 1)
    sender.library.set_buckets([bucket])
    with sender.library.expected():  # NCCL 2.26 names the communicator only in collectives
        sender.reduce(0, bucket)
    sender.reduce(0, bucket)
    assert sender.library.trouble == ""
    slicing = NcclSlicing()
    once = sum(
        len(send.where) * 4
        for channel in range(2)
        for send in slicing.tagged(slicing.part(100_000, 4, 2, channel), 4, 3, 1)
    )
    assert sum(sender.library.count(channel, 1)[0] for channel in range(2)) == 2 * once


@pytest.mark.parametrize("release", RELEASES)
def test_a_plugin_that_refused_a_communicator_first_is_used_later(make: Make, release: str) -> None:
    """DDP may make a communicator before there is a job, and others between our AllReduces.

    They may belong to another copy of NCCL in the process, whose callback does not know our sends.
    """
    sender = make(release, 1, 2, 1, has_second_communicator=True)
    bucket = NcclBucket(address(0), 10_000, 4, 0)
    sender.library.set_buckets([bucket])
    second_caller = Caller(Path(sender.caller.library._name), RELEASES[release])
    for times in range(1, 4):
        assert second_caller.init(ANOTHER + times, 2, 2, 1) != 0
        assert second_caller.tuned(ANOTHER + times, 2) == ([[5.0] * 3] * 7, 0)
        assert second_caller.coll(address(0), 10_000, "ncclFloat32", 1, comm_hash=ANOTHER + times) is None
        with sender.library.expected():
            sender.reduce(0, bucket)
        assert (sender.library.trouble, sender.library.count(0, 0)[0]) == ("", times * 20_000)


def test_each_net_works_with_each_profiler(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = NcclBucket(address(0), 10_000, 4, 0)
    for net, profiler in product((10, 11, 12), (3, 4, 5, 6)):
        monkeypatch.setitem(RELEASES, "mixed", Versions(net, profiler, 5))
        sender = make("mixed", 0, 2, 1)
        sender.library.set_buckets([bucket])
        with sender.library.expected():
            sender.reduce(0, bucket)
        tagged = sender.library.count(0, 0)[0]
        assert (sender.library.trouble, tagged) == ("", 20_000)


def test_versions_that_the_plugin_does_not_know_are_not_offered() -> None:
    plugin = ctypes.CDLL(str(shared_object()))
    offered = {
        name: [version for version in range(1, 30) if hasattr(plugin, f"{name}_v{version}")]
        for name in ("ncclNetPlugin", "ncclProfiler", "ncclTunerPlugin", "ncclCollNetPlugin")
    }
    assert offered == {
        "ncclNetPlugin": [10, 11, 12],
        "ncclProfiler": [3, 4, 5, 6],
        "ncclTunerPlugin": [4, 5, 6],
        "ncclCollNetPlugin": [],
    }


FIND = """
import ctypes, sys
from pathlib import Path
from checkmate.nccl.environment import settings
from checkmate.nccl.library import NcclLibrary
mine = NcclLibrary(Path(sys.argv[1]))
mine.stop("to be recognized")
for variable in ("NCCL_NET_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_TUNER_PLUGIN"):
    found = ctypes.CDLL(settings()[variable])
    text = ctypes.create_string_buffer(100)
    found.checkmate_nccl_trouble(text, 100)
    print(text.value.decode())
"""


def test_nccl_finds_the_plugin_that_the_process_has_loaded(tmp_path: Path) -> None:
    place = shutil.copy(shared_object(), tmp_path / "elsewhere.so")
    output = subprocess.check_output([sys.executable, "-c", FIND, str(place)], text=True)
    assert output.splitlines() == ["to be recognized"] * 3


def test_nccl_may_not_unload_the_plugin(tmp_path: Path) -> None:
    shutil.copy(shared_object(), tmp_path / "plugin.so")
    plugin = ctypes.CDLL(str(tmp_path / "plugin.so"))
    for _ in range(3):
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(plugin._handle))
    assert str(tmp_path / "plugin.so") in Path("/proc/self/maps").read_text()


def test_a_network_that_nccl_may_not_use_stays_unused(make: Make) -> None:
    sender = make("2.30", 0, 2, 2)
    assert sender.caller.tuned(JOB_COMM_HASH, 2, cost=-1.0) == ([[-1.0] * 3] * 7, 0)
    assert "unset NCCL_ALGO and NCCL_PROTO" in sender.library.trouble


@pytest.mark.parametrize("release", RELEASES)
def test_another_communicator_keeps_another_network(make: Make, release: str) -> None:
    sender = make(release, 0, 2, 1)
    sender.library.set_buckets([NcclBucket(address(0), 100, 4, 0)])
    second_caller = Caller(Path(sender.caller.library._name), RELEASES[release])
    assert second_caller.init(ANOTHER, 2, 2, 0) != 0
    with sender.library.expected():  # versions 2.26 and 2.27 connect with the first collective
        assert sender.caller.properties() == 0
    coll = second_caller.coll(address(0), 100, "ncclFloat32", 1)
    assert coll is None
    assert second_caller.proxy_op(coll, 0, 1) is None
    sender.send(0, 400, None)
    assert (sender.library.trouble, sender.library.count(0, 0)) == ("", (0, 0))
    assert second_caller.tuned(ANOTHER, 2) == ([[5.0] * 3] * 7, 0)


@pytest.mark.parametrize("release", RELEASES)
def test_the_tuner_chooses_the_ring_for_gradients(make: Make, release: str) -> None:
    sender = make(release, 0, 2, 2)
    with sender.library.expected():
        costs, channels = sender.caller.tuned(JOB_COMM_HASH, 2)
    assert (channels, costs[1][2]) == (2, 0.0)
    assert all(cost == -1 for i, row in enumerate(costs) for j, cost in enumerate(row) if (i, j) != (1, 2))
    assert sender.caller.tuned(JOB_COMM_HASH, 2, function=2) == ([[5.0] * 3] * 7, 0)


def test_a_second_communicator_during_the_creation_is_doubt(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    second_caller = Caller(Path(sender.caller.library._name), RELEASES["2.30"])
    with sender.library.expected():
        second_caller.init(ANOTHER, 2, 2, 0)
    assert "two communicators were created at once" in sender.library.trouble


def test_several_ranks_of_a_node_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plugin.so"
    shutil.copy(shared_object(), path)
    library = NcclLibrary(path)
    library.begin(NcclPlace(0, 4, LOOPBACK, "lo"), channels=1, slicing=NcclSlicing(), incarnation=1)
    caller = Caller(path, RELEASES["2.30"])
    with library.expected():
        caller.init(JOB_COMM_HASH, 2, 4, 0)
    assert "4 ranks on 2 nodes: use one rank for each node" in library.trouble


def test_a_communicator_of_another_size_is_refused(tmp_path: Path) -> None:
    shutil.copy(shared_object(), tmp_path / "plugin.so")
    library = NcclLibrary(tmp_path / "plugin.so")
    library.begin(NcclPlace(0, 4, LOOPBACK, "lo"), channels=1, slicing=NcclSlicing(), incarnation=1)
    with library.expected():
        Caller(tmp_path / "plugin.so", RELEASES["2.30"]).init(JOB_COMM_HASH, 2, 2, 0)
    assert "has 2 ranks, and the job 4" in library.trouble
