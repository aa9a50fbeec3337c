"""Frames dropped at a switch port of a lab, from given statistics and from a real switch."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.labs.live import needs_root
from tests.support.waiting import wait_until
from topologies.crew import CHECKMATE
from topologies.describe.topology import LabError, load
from topologies.kernel import links, namespaces
from topologies.lab import Lab
from topologies.traffic.port_drops import PortDrops, dropped, port_drops


def counts(disconnected: int = 0, unsendable: int = 0) -> dict[str, Any]:
    return {"refused": 7, "disconnected": disconnected, "withheld": 9, "unsendable": unsendable}


def test_ports_that_dropped_are_told_with_their_neighbours() -> None:
    topology = load("two_tor")
    tor0 = topology.switches[0]
    ports = {str(port): counts() for port in range(1, tor0.ports + 1)}
    (link,) = topology.links
    nic = topology.host("shadow0").interfaces[1]
    ports[str(nic.port)] = counts(disconnected=1)
    ports[str(link.a[1])] = counts(disconnected=2000, unsendable=3)
    drops = dropped(topology, tor0, {"ports": ports})
    assert drops == [
        PortDrops("tor0", nic.port, "shadow0 data1", 1, 0),
        PortDrops("tor0", link.a[1], f"tor1 port{link.b[1]}", 2000, 3),
    ]
    assert [str(drop) for drop in drops] == [
        f"switch tor0 dropped at port {nic.port} (shadow0 data1): 1 frame while it was not connected",
        f"switch tor0 dropped at port {link.a[1]} (tor1 port{link.b[1]}): "
        "2,000 frames while it was not connected and 3 frames that could not be sent",
    ]


@needs_root
def test_a_switch_tells_what_it_dropped_until_now(name: str) -> None:
    """Frames are flooded while one of the ports is down; a stopped switch reports nothing."""
    with Lab(load("single_tor"), "softswitch", name=name) as lab:
        assert port_drops(lab) == []
        nic = lab.topology.host("shadow1").interfaces[0]
        _install_flooding(lab)
        with namespaces.netlink(lab.namespace("tor")) as ip:
            ip.link("set", index=ip.link_lookup(ifname=f"port{nic.port}")[0], state="down")
        warning = f"port {nic.port} (port{nic.port}) is down: it counts as not connected"
        wait_until(lambda: warning in lab.log("tor").read_text())
        before = links.counters(lab.namespace("shadow0"))["data0"]["rx_packets"]
        _broadcast(lab, "rank0", 20)
        wait_until(lambda: links.counters(lab.namespace("shadow0"))["data0"]["rx_packets"] >= before + 20)
        (drops,) = port_drops(lab)
        assert (drops.switch, drops.port, drops.neighbour) == ("tor", nic.port, "shadow1 data0")
        assert drops.disconnected >= 20
        os.kill(lab.switch_pids["tor"], signal.SIGKILL)
        with pytest.raises(LabError, match="no longer writes statistics"):
            port_drops(lab, seconds=1.5)
        lab.stop_switch("tor")
        assert port_drops(lab) == []


def _install_flooding(lab: Lab) -> None:
    """Install the lab's job, whose flood group has every port."""
    command: list[str | Path] = [*CHECKMATE, "run", "--once", lab.job_file]
    assert lab.start("ctl", command).wait(60) == 0


def _broadcast(lab: Lab, host: str, frames: int) -> None:
    with namespaces.entered(lab.namespace(host)), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("data0", 0))
        for _ in range(frames):
            sock.send(b"\xff" * 6 + b"\x02" + b"\0" * 5 + b"\x88\xb5" + b"\0" * 50)
