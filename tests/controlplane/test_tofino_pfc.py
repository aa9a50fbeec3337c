"""Lossless delivery on a Tofino: headroom, thresholds, queues; impossible plans are refused with a reason."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from checkmate.job.schema import Job
from checkmate.job.tofino.chips import CHIPS
from checkmate.job.tofino.ports import resolve
from checkmate.job.validation import of_data
from controlplane import plan as planning
from controlplane.network import Network
from controlplane.tofino.pfc import (
    BETWEEN_FRAMES,
    ETHERNET,
    LEAST_FRAMES,
    RESPONSE_QUANTA,
    UNIT,
    NoRoom,
    PfcPlan,
    copies_by_port,
    frame_cells,
    headroom,
    host_commands,
    pfc_plan,
    port_peers,
    priority_clashes,
)
from testbed.jobs import job_data, tofino_job_data

CHIP = CHIPS["tofino"]
few = settings(max_examples=40)
speeds = st.sampled_from(sorted(RESPONSE_QUANTA))
mtus = st.integers(1280, 9216)
cables = st.floats(0.5, 500)


def tofino_job(**kwargs: Any) -> Job:
    switch = kwargs.pop("switch", {})
    data = tofino_job_data(**kwargs)
    data["fabric"]["switches"][0] |= switch
    assert resolve(data) == []
    return of_data(Job, data)


def planned(job: Job) -> tuple[Network, PfcPlan]:
    network = Network([job])
    plan = planning.plan([job])["tor0"]
    return network, pfc_plan(network, network.switches["tor0"], plan, job.tag.priority)


@given(speeds, cables, mtus)
@few
def test_headroom_grows_with_cable_and_mtu(speed: str, cable: float, mtu: int) -> None:
    assume(mtu < 9216)
    here = headroom(speed, cable, mtu, CHIP)
    assert headroom(speed, cable + 10, mtu, CHIP).bytes > here.bytes
    assert headroom(speed, cable, mtu + 1, CHIP).bytes == here.bytes + 2
    assert here.cells * CHIP.cell_bytes > here.bytes


@given(speeds, cables, mtus, st.data())
@few
def test_no_frames_that_come_in_meanwhile_take_more_cells(
    speed: str, cable: float, mtu: int, data: st.DataObject
) -> None:
    room = headroom(speed, cable, mtu, CHIP)
    lengths = data.draw(st.lists(st.integers(64, mtu + ETHERNET), min_size=1, max_size=30))
    wire = cells = turn = 0
    while wire + (frame := lengths[turn % len(lengths)]) + BETWEEN_FRAMES <= room.bytes:
        wire += frame + BETWEEN_FRAMES
        cells += frame_cells(frame, CHIP)
        turn += 1
    assert cells <= room.cells


def test_headroom_of_a_100g_port_by_hand() -> None:
    """5 m of cable hold 631.3 bytes in both directions at 100 Gbit/s; the peer has 394 quanta of 64 bytes."""
    room = headroom("100G", 5, 9000, CHIP)
    assert (room.own_frame, room.pfc_frame, room.cable, room.response) == (9038, 84, 632, 25216)
    assert room.bytes == 9038 + 84 + 632 + 25216 + 15360 + 9038
    terms, total = room.arithmetic().split(" = ")
    assert sum(int(term) for term in re.findall(r"(\d+) \(", terms)) == room.bytes == int(total.split()[0])


jobs = st.builds(
    tofino_job,
    ranks=st.integers(2, 8),
    groups=st.integers(1, 2),
    nodes=st.integers(1, 4),
    nics=st.integers(1, 2),
    channels=st.integers(1, 3),
    switch=st.fixed_dictionaries(
        {"mtu": mtus, "cable": st.floats(0.5, 300), "speed": st.sampled_from(["40G", "100G"])}
    ),
)


@given(jobs)
@few
def test_whatever_ingress_admits_has_room(job: Job) -> None:
    network, plan = planned(job)
    switch_plan = planning.plan([job])["tor0"]
    peers, shadows = port_peers(network, "tor0")
    groups = copies_by_port(network, switch_plan)
    admitted = {sender.port.device_port: sender.admitted_cells(plan.threshold) for sender in plan.senders}
    assert set(admitted) == set(peers) - shadows
    assert sum(admitted.values()) == plan.ingress_pool + plan.skid_pool <= plan.available
    copied = sum(sender.admitted_cells(plan.threshold) * sender.copies for sender in plan.senders)
    assert copied == plan.egress_pool <= plan.available
    shares = sum(sender.copies for sender in plan.senders)
    assert plan.egress_pool + UNIT * shares > plan.available, "a higher threshold would do"
    assert plan.threshold % UNIT == plan.hysteresis % UNIT == 0
    assert 0 < plan.hysteresis < plan.threshold
    rooms = {queue.port.device_port: queue.cells for queue in plan.queues}
    assert set(rooms) >= shadows & {out for gs in groups.values() for g in gs for out, _ in g.replicas}
    for port, room in rooms.items():
        senders = {i for i, gs in groups.items() if any(port == out for g in gs for out, _ in g.replicas)}
        if port not in shadows:
            senders |= set(admitted) - {port}
        assert room >= sum(admitted[i] for i in senders)


@pytest.mark.parametrize("middle", [0, 1])
def test_copies_that_come_over_a_link_have_room_too(middle: int) -> None:
    """Copies for a shadow NIC at another switch than its ranks arrive there as plain unicast."""
    data = job_data(switches=2 + middle, ranks=2, nodes=1, nics=1, target="tofino")
    last = f"tor{1 + middle}"
    for number, rank in enumerate(data["dp_groups"][0]["ranks"]):
        rank |= {"switch": "tor0", "port": 60 - 4 * number}
    data["shadow_nodes"][0]["nics"][0] |= {"switch": last, "port": 60}
    for link in data["fabric"]["links"]:
        for side, end in enumerate(link):
            end["port"] = 8 * (1 + side)
    job = of_data(Job, data)
    network, plans = Network([job]), planning.plan([job])
    pfc_plans = {name: pfc_plan(network, network.switches[name], plan, 3) for name, plan in plans.items()}
    assert set(pfc_plans) == {switch.name for switch in job.fabric.switches}
    (link,) = pfc_plans[last].senders
    (shadow,) = [queue for queue in pfc_plans[last].queues if queue.shadow]
    assert shadow.cells == link.admitted_cells(pfc_plans[last].threshold) <= pfc_plans[last].egress_pool
    for name, plan in pfc_plans.items():
        peers, _ = port_peers(network, name)
        assert {queue.port.device_port for queue in plan.queues} == set(peers) - (
            {16} if name == last else set()
        )


@given(jobs, st.integers(1, 400_000))
@few
def test_too_small_a_buffer_is_refused_with_the_arithmetic(job: Job, cells: int) -> None:
    (switch,) = job.fabric.switches
    small_switch = replace(switch, pfc=replace(switch.pfc, cells=cells))
    job = replace(job, fabric=replace(job.fabric, switches=(small_switch,)))
    least = LEAST_FRAMES * frame_cells(switch.mtu + ETHERNET, CHIP)
    try:
        _, plan = planned(job)
    except NoRoom as error:
        match = re.search(
            r"copies: (.*) = (\d+) cells of the (\d+) .*rest is (-?\d+), for (\d+) thr", str(error)
        )
        assert match, error
        headroom_cells = sum(int(a) * int(b) for a, b in re.findall(r"(\d+) x (\d+)", match[1]))
        assert (headroom_cells, cells) == (int(match[2]), int(match[3]))
        assert cells - headroom_cells == int(match[4])
        assert int(match[4]) // int(match[5]) // UNIT * UNIT < least
    else:
        assert plan.threshold >= least


@pytest.mark.parametrize(("missing", "works"), [(0, True), (1, False)])
def test_the_least_threshold_is_two_frames(missing: int, works: bool) -> None:
    """Three ports of 1,397 cells of headroom, two of them with two copies; frames of 9,018 + 16 bytes."""
    least = 2 * 113 + 6  # in steps of 8
    cells = 5 * (1397 + least) - missing
    job = tofino_job(switch={"pfc": {"cells": cells}})
    if works:
        assert planned(job)[1].threshold == least
    else:
        with pytest.raises(NoRoom, match="at least 226 cells"):
            planned(job)


def test_jobs_that_share_a_switch_have_one_priority() -> None:
    first, two, three = tofino_job(), tofino_job(name="two", number=1), tofino_job(name="three")
    clashing = replace(two, tag=replace(two.tag, priority=5, dscp_bit=16))
    elsewhere = replace(three.fabric.switches[0], name="tor9")
    away = replace(clashing, job="three", fabric=replace(three.fabric, switches=(elsewhere,)))
    assert priority_clashes([first, two, away]) == {}
    ((name, message),) = priority_clashes([first, clashing, away]).items()
    assert name == "two"
    assert "DSCP 0 would have priority 5 here and 3 in job 'demo', on switch 'tor0'" in message


def test_hosts_map_plain_and_tagged_segments_to_one_priority() -> None:
    job = tofino_job(nodes=2, nics=1)
    job = replace(job, tag=replace(job.tag, priority=5, dscp_bit=8))
    hosts = list(host_commands([job]))
    assert [host.port for host in hosts] == ["1/0", "2/0", "3/0", "4/0", "5/0"]
    for host in hosts:
        assert any("dscp-prio 0:5 8:5" in command for command in host.commands)
        gives_up = any("pfc-prevention-tout 200" in command for command in host.commands)
        assert gives_up == host.host.startswith("shadow node")


@pytest.mark.skipif(not shutil.which("ethtool"), reason="needs ethtool")
def test_ethtool_understands_what_hosts_are_told() -> None:
    """The loopback interface supports none of it, but ethtool gets as far as the kernel call."""
    (host, *_) = [h for h in host_commands([tofino_job()]) if h.host.startswith("shadow node")]
    commands = [command for command in host.commands if command.startswith("ethtool")]
    assert len(commands) == 2
    for command in commands:
        shell = ["sh", "-c", f"DEV=lo; {command}"]
        result = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=20)
        assert re.search("not supported|not permitted", result.stderr, re.IGNORECASE), (
            command,
            result.stderr,
        )
        wrong = subprocess.run([*shell[:-1], f"{shell[-1]}0 x"], capture_output=True, text=True, check=False)
        assert wrong.returncode != 0
        assert "ot supported" not in wrong.stderr
