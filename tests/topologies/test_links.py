"""Training links of a lab: delay, loss, and large frames."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.capabilities import check_keeps
from tests.support.labs.live import needs_bmv2, needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from topologies.crew import Crew, serving
from topologies.describe.job_files import Target
from topologies.describe.topology import CABLES, BadDescription, build, load
from topologies.kernel import namespaces
from topologies.kernel.jitter import seconds
from topologies.lab import Lab
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic, TrafficOutcome

pytestmark = [needs_root, needs_clang]
JITTER = 0.005
PAIR = on_one_switch(2, (1,))


def gather(lab: Lab, nbytes: int) -> TrafficOutcome:
    """Gather this many bytes with rings, and check the outcome."""
    with Crew(lab) as crew, serving(crew):
        outcome = Traffic(crew, Load(nbytes)).run()
    assert outcome.good, outcome.data()
    assert outcome.verdict.tagged >= nbytes
    return outcome


def round_trips(lab: Lab, source: str, destination: str, count: int) -> list[float]:
    """Return round-trip times of datagrams to `destination`'s training address, in seconds."""
    ips = [str(lab.topology.host(host).interfaces[0].ip) for host in (source, destination)]
    with namespaces.entered(lab.namespace(destination)):
        far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with namespaces.entered(lab.namespace(source)):
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with far, near:
        far.bind((ips[1], 9))
        near.bind((ips[0], 9))
        near.settimeout(5)
        far.settimeout(5)
        times = []
        for _ in range(count):
            start = time.monotonic()
            near.sendto(b"there", (ips[1], 9))
            far.recv(16)
            far.sendto(b"back", (ips[0], 9))
            near.recv(16)
            times.append(time.monotonic() - start)
    return times


@pytest.fixture(scope="module")
def late() -> Iterator[Lab]:
    """Yield a lab with jitter and a running controller."""
    name = f"l{os.getpid()}_{random.randrange(10**6)}"
    with Lab(load("single_tor"), name=name, jitter=JITTER) as lab, Crew(lab) as crew, serving(crew):
        yield lab


def test_training_links_delay_at_random_and_shadow_links_do_not(late: Lab) -> None:
    trained = sorted(round_trips(late, "rank0", "rank1", 200))
    # Four cables, each with a delay of 0 to 5 ms; a busy machine only adds to that.
    assert trained[100] > 1.2 * JITTER
    assert trained[180] - trained[20] > JITTER
    assert min(round_trips(late, "shadow0", "shadow1", 100)) < 0.6 * JITTER


def test_the_process_of_the_cables_keeps_no_capability(late: Lab) -> None:
    (process,) = namespaces.processes([late.namespace(CABLES)])
    check_keeps(process)


def test_no_frame_overtakes_another(late: Lab) -> None:
    round_trips(late, "rank0", "rank1", 1)  # addresses are resolved
    with namespaces.entered(late.namespace("rank1")):
        far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with namespaces.entered(late.namespace("rank0")):
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with far, near:
        far.bind(("10.0.1.2", 9))
        far.settimeout(5)
        for number in range(200):
            near.sendto(number.to_bytes(2), ("10.0.1.2", 9))
            time.sleep(0.0002)
        assert [int.from_bytes(far.recv(2)) for _ in range(200)] == list(range(200))


@pytest.mark.slow
def test_jitter_costs_no_stream_a_byte_and_nothing_of_it_stays(name: str) -> None:
    with Lab(load("single_tor"), name=name, jitter=JITTER) as lab:
        assert gather(lab, 10_000_000).seconds
        pids = namespaces.processes([lab.namespace(CABLES)])
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)
    assert not namespaces.of_lab(name)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["softswitch", pytest.param("bmv2", marks=needs_bmv2)])
def test_jitter_and_loss_cost_no_stream_a_byte(name: str, target: Target) -> None:
    with Lab(load("single_tor"), target, name=name, jitter=JITTER, loss=0.01) as lab:
        assert gather(lab, 10_000_000).retransmitted > 0


def test_a_delay_that_is_none_is_refused() -> None:
    with pytest.raises(BadDescription, match="seconds from 0 to 1"):
        Lab(load("single_tor"), jitter=5)


@pytest.mark.parametrize(
    ("text", "delay"), [("5ms", 0.005), ("500us", 0.0005), ("0.25s", 0.25), ("0.005", 0.005), ("0", 0.0)]
)
def test_a_delay_is_read(text: str, delay: float) -> None:
    assert seconds(text) == pytest.approx(delay)


@pytest.mark.parametrize("text", ["5m", "1.5s", "-1ms", "ms", "", "nan", "long"])
def test_no_delay_is_refused(text: str) -> None:
    with pytest.raises(BadDescription, match="use a delay such as 5ms"):
        seconds(text)


def bytes_a_frame(lab: Lab) -> float:
    """Return bytes per frame at the first rank's port: its ring's data, and ACKs."""
    counters = lab.stats()["tor"]["port1"]
    return counters["rx_bytes"] / counters["rx_packets"]


@pytest.mark.slow
def test_frames_of_9000_bytes(name: str) -> None:
    """Offloads are off, so that frame lengths are those on a wire."""
    with Lab(build("pair", PAIR), name=name, mtu=9000, offloads=False) as lab:
        gather(lab, 20_000_000)
        assert 4000 < bytes_a_frame(lab) < 9014
        shadow = lab.stats()["tor"]["port3"]
        assert 6000 < shadow["tx_bytes"] / shadow["tx_packets"] < 9014


@pytest.mark.slow
def test_segments_of_64_kb_at_an_mtu_of_9000(name: str) -> None:
    with Lab(build("pair", PAIR), name=name, mtu=9000) as lab:
        gather(lab, 20_000_000)
        assert bytes_a_frame(lab) > 9014


@pytest.mark.slow
@needs_bmv2
@pytest.mark.parametrize("topology", ["single_tor", "two_tor"])
def test_frames_of_9000_bytes_on_bmv2(name: str, topology: str) -> None:
    with Lab(load(topology), "bmv2", name=name, mtu=9000) as lab:
        gather(lab, 20_000_000)
