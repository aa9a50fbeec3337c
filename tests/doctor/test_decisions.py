"""What facts about a host mean for its role: tables of facts, and what is finding."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Network, ip_address
from typing import Any

import pytest

from checkmate.base.privileges import Capability
from checkmate.doctor import host_checks, network_checks
from checkmate.doctor.facts import Clock, Facts, NicFacts
from checkmate.doctor.findings import Finding, Outcome, finding_from_error
from checkmate.doctor.subjects import Subject, choose, shadow
from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.keys.roles import Role
from testbed.jobs import job, job_data, tofino_job_data

GPT = job("gpt", nics=1)
TWO = job("gpt", nics=2)
OK, WARNING, FAILED, SKIPPED = Outcome.OK, Outcome.WARNING, Outcome.FAILED, Outcome.SKIPPED
TAGGING = (Capability.BPF, Capability.PERFMON, Capability.NET_ADMIN)
OFFLOADS = {"tso": True, "gso": True, "gro": True, "tx": True, "rx": True}


def facts(**changes: Any) -> Facts:
    usual = Facts("6.1.0", frozenset(TAGGING), True, 1024, 10**9, {}, {})
    return replace(usual, **changes)


def eth(number: int = 0, **changes: Any) -> NicFacts:
    """Return the interface of the first shadow node's NIC of that number, as it should be."""
    mac = TWO.shadow_nodes[0].nics[number].mac
    network = IPv4Network("10.0.64.0/24")
    usual = NicFacts(f"eth{number}", True, True, mac, 1500, network, "mlx5_core", OFFLOADS)
    return replace(usual, **changes)


def interface_findings(subject: Subject, *nics: NicFacts | None, **sysctls: str) -> dict[str, list[Finding]]:
    """Return the findings about a host's interfaces, by check."""
    settings = {key.replace("__", "."): value for key, value in sysctls.items()}
    by_address = {str(nic.ip): nic_facts for nic, nic_facts in zip(subject.nics, nics, strict=True)}
    by_check: dict[str, list[Finding]] = {}
    for finding in network_checks.interfaces(subject, facts(nics=by_address, sysctls=settings)):
        by_check.setdefault(finding.check.split()[0], []).append(finding)
    return by_check


def on(target: str, role: Role) -> Subject:
    """Return a host at a switch of a target."""
    data = tofino_job_data(nics=1) if target == "tofino" else job_data("gpt", nics=1, target=target)
    if target == "tofino":
        for place, port in enumerate([*data["dp_groups"][0]["ranks"], data["shadow_nodes"][0]["nics"][0]]):
            port["port"] = place
    job_at_switch = of_data(Job, data)
    return shadow(job_at_switch, 0) if role is Role.SHADOW else choose(job_at_switch, Role.TRAINER, 0, None)


@pytest.mark.parametrize(
    ("role", "release", "outcome"),
    [
        (Role.TRAINER, "5.10.0-30-amd64", WARNING),
        (Role.TRAINER, "5.11", OK),
        (Role.TRAINER, "6.18.44-custom", OK),
        (Role.TRAINER, "5.9.16", FAILED),
        (Role.SHADOW, "5.10.0", OK),
        (Role.SHADOW, "4.19.0", WARNING),
        (Role.CONTROLLER, "4.19.0", SKIPPED),
    ],
)
def test_kernels(role: Role, release: str, outcome: Outcome) -> None:
    assert host_checks.kernel(role, release).outcome is outcome


@pytest.mark.parametrize(
    ("role", "effective", "tags", "ports", "outcome", "words"),
    [
        (Role.TRAINER, TAGGING, True, [], OK, "CAP_BPF"),
        (Role.TRAINER, [Capability.NET_ADMIN, Capability.SYS_ADMIN], True, [], OK, ""),
        (Role.TRAINER, [Capability.NET_ADMIN], True, [], FAILED, "CAP_BPF, CAP_PERFMON missing"),
        (Role.TRAINER, [], False, [], SKIPPED, "no rank of this host tags"),
        (Role.SHADOW, [Capability.NET_ADMIN], False, [7000], OK, ""),
        (Role.SHADOW, [], False, [7000], FAILED, "CAP_NET_ADMIN (for its receive buffers) missing"),
        (Role.SHADOW, [Capability.NET_ADMIN], False, [700], FAILED, "CAP_NET_BIND_SERVICE"),
        (Role.CONTROLLER, [], False, [], SKIPPED, "none"),
    ],
)
def test_capabilities(
    role: Role, effective: list[Capability], tags: bool, ports: list[int], outcome: Outcome, words: str
) -> None:
    finding = host_checks.capabilities(role, effective, tags=tags, ports=ports)
    assert (finding.outcome, words in finding.detail) == (outcome, True), finding
    assert bool(finding.remedy) == (outcome is FAILED)


@pytest.mark.parametrize(
    ("finding", "outcome"),
    [
        (host_checks.open_files(1024, 64, 16), OK),
        (host_checks.open_files(1024, 2048, 16), WARNING),
        (host_checks.memory(10**9, 8, 64 << 20), WARNING),
        (host_checks.memory(2 * 10**9, 8, 64 << 20), OK),
        (host_checks.trainers_buffers(facts(), 4 << 20), OK),
    ],
)
def test_limits(finding: Finding, outcome: Outcome) -> None:
    assert finding.outcome is outcome


@pytest.mark.parametrize(
    ("listening", "firewall", "outcome"),
    [
        (("127.0.0.1", 29400), "", OK),
        (("0.0.0.0", 29401), "", OK),
        (("0.0.0.0", 29400), "", WARNING),
        (("0.0.0.0", 29400), None, WARNING),
        (("0.0.0.0", 29400), "tcp dport 29400 accept", WARNING),
        (("0.0.0.0", 29400), "counter packets 29400 bytes 8 drop", WARNING),
        (("0.0.0.0", 29400), "type filter hook input priority 0; policy drop;", OK),
        (("::", 29400), "tcp dport { 129400, 80 } drop", WARNING),
        (("192.168.0.1", 29400), "tcp dport { 29400, 32768-60999 } drop", OK),
    ],
)
def test_an_open_rendezvous_is_named(
    listening: tuple[str, int], firewall: str | None, outcome: Outcome
) -> None:
    """Whoever reaches it runs code as the agents' user."""
    at = frozenset({(ip_address(listening[0]), listening[1])})
    assert host_checks.rendezvous(facts(listening=at, firewall=firewall)).outcome is outcome


@pytest.mark.parametrize(
    ("sysctls", "outcome", "remedy"),
    [
        (
            {"net.core.rmem_max": "212992", "net.core.wmem_max": "8388608"},
            WARNING,
            "net.core.rmem_max=4194304",
        ),
        ({"net.core.rmem_max": "8388608", "net.core.wmem_max": "8388608"}, OK, ""),
        ({}, SKIPPED, ""),
    ],
)
def test_ranks_without_net_admin_have_the_limits_of_others(
    sysctls: dict[str, str], outcome: Outcome, remedy: str
) -> None:
    finding = host_checks.trainers_buffers(facts(capabilities=frozenset(), sysctls=sysctls), 4 << 20)
    assert (finding.outcome, finding.remedy.removeprefix("sysctl -w ")) == (outcome, remedy)


@pytest.mark.parametrize(
    ("role", "value", "outcome"),
    [
        (Role.SHADOW, "0", FAILED),
        (Role.TRAINER, "0", WARNING),
        (Role.SHADOW, "1", OK),
        (Role.SHADOW, None, SKIPPED),
        (Role.CONTROLLER, "0", SKIPPED),
    ],
)
def test_windows_must_scale(role: Role, value: str | None, outcome: Outcome) -> None:
    sysctls = {} if value is None else {"net.ipv4.tcp_window_scaling": value}
    assert host_checks.windows(role, facts(sysctls=sysctls)).outcome is outcome


@pytest.mark.parametrize(
    ("role", "clock", "outcome"),
    [
        (Role.SHADOW, Clock(True, 0.004), OK),
        (Role.CONTROLLER, Clock(False, 16.0), WARNING),
        (Role.SHADOW, None, WARNING),
        (Role.TRAINER, Clock(False, 16.0), SKIPPED),
    ],
)
def test_what_the_kernel_knows_of_its_clock(role: Role, clock: Clock | None, outcome: Outcome) -> None:
    finding = host_checks.clock(role, facts(clock=clock))
    assert finding.outcome is outcome
    assert outcome is SKIPPED or "must not differ by 60 s" in finding.detail


@pytest.mark.parametrize(
    ("nic", "outcome", "words"),
    [
        (eth(), OK, "eth0, up"),
        (None, FAILED, "not an address of this host"),
        (eth(up=False), FAILED, "eth0 is down"),
        (eth(carrier=False), FAILED, "no carrier"),
        (eth(mac="02:00:00:00:00:99"), FAILED, "02:00:00:00:00:99, the job file 02:"),
        (eth(loopback=True), SKIPPED, "loopback"),
    ],
)
def test_interfaces(nic: NicFacts | None, outcome: Outcome, words: str) -> None:
    (finding,) = interface_findings(shadow(GPT, 0), nic)["interface"]
    assert (finding.outcome, words in finding.detail) == (outcome, True), finding
    assert bool(finding.remedy) == (outcome is FAILED)


@pytest.mark.parametrize(
    ("target", "role", "mtu", "outcome"),
    [
        ("softswitch", Role.SHADOW, 1500, OK),
        ("softswitch", Role.SHADOW, 576, WARNING),
        ("softswitch", Role.TRAINER, 576, WARNING),
        ("bmv2", Role.TRAINER, 9000, OK),
        ("tofino", Role.SHADOW, 9000, OK),
        ("tofino", Role.SHADOW, 1500, FAILED),
        ("tofino", Role.TRAINER, 1500, OK),
        ("tofino", Role.TRAINER, 9216, FAILED),
    ],
)
def test_mtus(target: str, role: Role, mtu: int, outcome: Outcome) -> None:
    (finding,) = interface_findings(on(target, role), eth(mtu=mtu))["MTU"]
    assert finding.outcome is outcome, finding


def test_interfaces_of_a_host_must_not_differ_in_mtu() -> None:
    *_, finding = interface_findings(shadow(TWO, 0), eth(), eth(1, mtu=9000))["MTU"]
    assert (finding.outcome, "eth0 has 1500, eth1 has 9000" in finding.detail) == (WARNING, True)


@pytest.mark.parametrize(
    ("target", "role", "driver", "off", "outcome", "remedy"),
    [
        ("softswitch", Role.SHADOW, "mlx5_core", (), OK, ""),
        ("softswitch", Role.SHADOW, "mlx5_core", ("gro",), WARNING, "ethtool -K eth0 gro on"),
        ("softswitch", Role.SHADOW, "veth", ("gro",), OK, ""),
        ("softswitch", Role.TRAINER, "veth", ("gro", "tso"), WARNING, "ethtool -K eth0 tso on"),
        ("bmv2", Role.TRAINER, "veth", ("gro",), FAILED, "ethtool -K eth0 tso off gso off tx off"),
        ("bmv2", Role.TRAINER, "ice", ("gro", "tso", "gso"), WARNING, "ethtool -K eth0 tx off"),
        ("bmv2", Role.SHADOW, "veth", ("tso", "gso", "gro", "tx", "rx"), OK, ""),
    ],
)
def test_offloads(
    target: str, role: Role, driver: str, off: tuple[str, ...], outcome: Outcome, remedy: str
) -> None:
    nic = eth(driver=driver, offloads={name: name not in off for name in OFFLOADS})
    (finding,) = interface_findings(on(target, role), nic)["offloads"]
    assert (finding.outcome, finding.remedy) == (outcome, remedy), finding


def test_a_driver_that_does_not_tell_is_no_fault() -> None:
    (finding,) = interface_findings(shadow(GPT, 0), eth(offloads={}))["offloads"]
    assert finding.outcome is SKIPPED


@pytest.mark.parametrize(
    ("settings", "outcome", "remedy"),
    [
        ({"arp_ignore": "1", "arp_announce": "2", "rp_filter": "0"}, OK, ""),
        ({"arp_ignore": "1", "arp_announce": "2", "rp_filter": "2"}, OK, ""),
        ({"arp_ignore": "1", "arp_announce": "2", "rp_filter": "1"}, FAILED, "net.ipv4.conf.all.rp_filter=2"),
        (
            {"arp_ignore": "0", "arp_announce": "2", "rp_filter": "0"},
            WARNING,
            "net.ipv4.conf.all.arp_ignore=1",
        ),
    ],
)
def test_interfaces_in_one_subnet(settings: dict[str, str], outcome: Outcome, remedy: str) -> None:
    sysctls = {f"net__ipv4__conf__all__{key}": value for key, value in settings.items()}
    sysctls |= {f"net__ipv4__conf__eth1__{key}": "0" for key in settings}
    (finding,) = interface_findings(shadow(TWO, 0), eth(), eth(1), **sysctls)["ARP"]
    assert (finding.outcome, finding.remedy.removeprefix("sysctl -w ")) == (outcome, remedy), finding


def test_interfaces_in_different_subnets_need_no_setting() -> None:
    (finding,) = interface_findings(shadow(TWO, 0), eth(), eth(1, network=IPv4Network("10.1.0.0/24")))["ARP"]
    assert finding.outcome is SKIPPED


RANGE = "net.ipv4.ip_local_port_range"
RESERVED = "net.ipv4.ip_local_reserved_ports"


@pytest.mark.parametrize(
    ("sysctls", "ports_in_use", "outcome", "words"),
    [
        ({RANGE: "32768\t60999", RESERVED: ""}, (), WARNING, f"sysctl -w {RESERVED}=47000-47001,47008"),
        ({RANGE: "32768 60999", RESERVED: "8080"}, (), WARNING, f"{RESERVED}=8080,47000-47001,47008"),
        ({RANGE: "32768 60999", RESERVED: "80,47000-47007,47008"}, (), OK, ""),
        ({RANGE: "50000 60999"}, (), OK, ""),
        ({}, (), OK, ""),
        ({}, (("10.0.0.1", 47001),), WARNING, "ss -ltnp"),
        ({}, (("0.0.0.0", 47001),), WARNING, "ss -ltnp"),
        ({}, (("::", 47001),), WARNING, "ss -ltnp"),
        ({}, (("10.0.0.2", 47001), ("10.0.0.1", 22)), OK, ""),
    ],
)
def test_ports_of_the_ring(
    sysctls: dict[str, str], ports_in_use: tuple[tuple[str, int], ...], outcome: Outcome, words: str
) -> None:
    listening = frozenset((ip_address(ip), port) for ip, port in ports_in_use)
    at = [("10.0.0.1", port) for port in (47000, 47001, 47008)]
    finding = network_checks.ring_ports(at, facts(sysctls=sysctls, listening=listening))
    assert (finding.outcome, words in finding.remedy) == (outcome, True), finding


@pytest.mark.parametrize(
    ("here", "runs", "ports_in_use", "outcome", "words"),
    [
        (["192.168.100.0"], False, [], OK, "192.168.100.0:7000 and 192.168.100.0:7001 free"),
        (["192.168.100.0"], True, [7000, 7001], OK, "shadow node 0 runs"),
        (["192.168.100.0"], False, [7001], WARNING, "192.168.100.0:7001 in use"),
        ([], False, [], FAILED, "is not this host"),
    ],
)
def test_ports_of_a_shadow_node(
    here: list[str], runs: bool, ports_in_use: list[int], outcome: Outcome, words: str
) -> None:
    listening = frozenset((ip_address("192.168.100.0"), port) for port in ports_in_use)
    finding = network_checks.own_ports(shadow(GPT, 0), facts(listening=listening), here, runs=runs)
    assert (finding.outcome, words in finding.detail) == (outcome, True), finding


def test_a_message_gives_its_own_remedy_or_a_general_one() -> None:
    assert finding_from_error("keys", "a is missing; copy it", "read") == Finding(
        "keys", FAILED, "a is missing", "copy it"
    )
    assert finding_from_error("keys", "a is missing", "read").remedy == "read"
    ran = finding_from_error("keys", "a is missing: run `checkmate keys FILE`; or so", "read")
    assert (ran.detail, ran.remedy) == ("a is missing", "run `checkmate keys FILE`; or so")
    assert str(finding_from_error("keys", "a is missing", "read")) == "keys: a is missing; read"
