"""A host as it is read: interfaces with real settings, listeners, sysctls, routes."""

from __future__ import annotations

import socket
from contextlib import closing
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from pyroute2.ethtool.ioctl import IoctlEthtool

from checkmate.doctor import role_checks
from checkmate.doctor.facts import Facts
from checkmate.doctor.findings import Outcome
from checkmate.doctor.reading import is_here, listening, read, route_error, source_to
from checkmate.doctor.subjects import shadow
from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from tests.support.labs.live import needs_root
from tests.support.namespace_host import MAC, NET, job_there
from tests.support.waiting import wait_until
from topologies.kernel import namespaces


def facts_in(host: str, *addresses: str) -> Facts:
    with namespaces.entered(host):
        return read(addresses)


@needs_root
def test_interfaces_are_read_with_their_settings(host: str) -> None:
    facts_read = facts_in(host, "10.77.0.1", "10.77.0.2", "10.77.0.3")
    first, second = facts_read.nics["10.77.0.1"], facts_read.nics["10.77.0.2"]
    assert first is not None and second is not None
    assert (first.name, first.mtu, first.mac, first.driver) == ("eth0", 576, f"{MAC[:-1]}0", "veth")
    assert (first.up, first.carrier, first.loopback, first.network) == (True, True, False, NET)
    assert set(first.offloads.values()) == {False}
    assert (second.mtu, second.offloads["tso"]) == (1500, True)
    assert facts_read.nics["10.77.0.3"] is None
    assert facts_read.sysctls["net.ipv4.conf.all.arp_ignore"] == "1"
    assert facts_read.number("net.ipv4.conf.eth1.rp_filter") == 0


@needs_root
def test_what_is_switched_is_read_as_it_is_then(host: str) -> None:
    with namespaces.entered(host):
        with closing(IoctlEthtool("eth1")) as ethtool:
            ethtool.set_offload_flag("tcp-segmentation-offload", 0)
        Path("/proc/sys/net/ipv4/tcp_window_scaling").write_text("0")
    with namespaces.netlink(host) as ip:
        ip.link("set", index=ip.link_lookup(ifname="far1")[0], state="down")

    def carrier() -> bool:
        nic = facts_in(host, "10.77.0.2").nics["10.77.0.2"]
        return nic is not None and nic.carrier

    wait_until(lambda: not carrier(), "the other end to lose its carrier", 5)  # the kernel does it later
    facts_read = facts_in(host, "10.77.0.2")
    nic = facts_read.nics["10.77.0.2"]
    assert nic is not None
    assert (nic.offloads["tso"], nic.offloads["gso"]) == (False, True)
    assert (nic.up, nic.carrier) == (True, False)
    assert facts_read.number("net.ipv4.tcp_window_scaling") == 0


@needs_root
def test_listeners_and_routes_are_those_of_the_namespace(host: str) -> None:
    with namespaces.entered(host), socket.create_server(("10.77.0.1", 47001)):
        facts_read = read([])
        assert facts_read.listening == {(IPv4Address("10.77.0.1"), 47001)}
        assert facts_read.listens("10.77.0.1", 47001) and not facts_read.listens("10.77.0.2", 47001)
        assert route_error("10.77.0.1", "10.77.0.9") is None
        assert "unreachable" in str(route_error("10.77.0.1", "10.9.9.9"))
        assert "assign" in str(route_error("10.9.9.9", "10.77.0.1"))
        assert (source_to("10.77.0.9"), source_to("10.9.9.9")) == ("10.77.0.1", None)
        assert is_here("10.77.0.2") and not is_here("10.77.0.3")


def test_the_kernels_own_tables_are_understood() -> None:
    """A socket at each kind of address is found where it is."""
    with (
        socket.create_server(("127.0.0.7", 0)) as narrow,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as wide,
    ):
        places = {(str(address), port) for address, port in listening()}
        ports = [sock.getsockname()[1] for sock in (narrow, six, wide)]
        assert {("127.0.0.7", ports[0]), ("::1", ports[1]), ("::", ports[2])} <= places
        assert read([]).listens("127.0.0.8", ports[2])


def test_what_takes_long_or_is_forbidden_to_services_is_left_out_at_their_start() -> None:
    quick = read([], quick=True)
    assert (quick.clock, quick.listening) == (None, frozenset())
    clock = read([]).clock
    assert clock is None or clock.error >= 0
    assert is_here("127.0.0.1") and is_here("::1") and not is_here("no-such-host.invalid")


@needs_root
def test_routes_and_source_addresses_are_checked_as_the_kernel_has_them(host: str) -> None:
    """The stub is out of reach; the other node, at 10.77.0.9, would be called from 10.77.0.1."""
    data = data_of(job_there(), exclude_none=True)
    second = {**data["shadow_nodes"][0], "id": 1, "mgmt": "10.77.0.9:7000"}
    data["shadow_nodes"] += [{**second, "nics": [{**second["nics"][0], "ip": "10.77.0.8", "mac": MAC}]}]
    node = shadow(of_data(Job, data), 0)
    with namespaces.entered(host):
        findings = list(role_checks.routes(node, read(["10.77.0.1", "10.77.0.2"])))
        assert [finding.outcome for finding in findings] == [Outcome.FAILED, Outcome.FAILED]
        assert "none from 10.77.0.1 to the stub at 10.255.0.1 (Network is unreachable)" in findings[0].detail
        assert [finding.outcome for finding in role_checks.routes(node, read([]))] == [Outcome.SKIPPED]
        finding = role_checks.source_addresses(node, ["10.77.0.2"])
        assert (finding.outcome, "calls 10.77.0.9 from 10.77.0.1" in finding.detail) == (Outcome.FAILED, True)
        assert role_checks.source_addresses(node, ["10.77.0.1", "10.77.0.2"]).outcome is Outcome.OK
        assert role_checks.source_addresses(node, []).outcome is Outcome.SKIPPED
        with namespaces.netlink(host) as ip:
            index = ip.link_lookup(ifname="eth0")[0]
            ip.addr("add", index=index, address="10.255.0.9", prefixlen=24)
        assert [finding.outcome for finding in role_checks.routes(node, read(["10.77.0.1"]))] == [Outcome.OK]


def test_a_host_without_a_compiler_is_told_that_steps_are_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert role_checks.step_kernel().outcome is Outcome.OK
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    finding = role_checks.step_kernel()
    assert finding.outcome is Outcome.WARNING
    assert finding.detail == "the step kernel needs a C compiler; PyTorch steps, several times slower"
    assert finding.remedy == "apt-get install gcc libc6-dev"
