"""Checks of a host's network: interfaces, MTU, offloads, ports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from checkmate.doctor.facts import Facts, NicFacts, is_numeric
from checkmate.doctor.findings import Finding, failed, ok, skipped, warning
from checkmate.doctor.subjects import Subject
from checkmate.job.schema import Host
from checkmate.keys.roles import Role

ETHERNET: Final = 1500
_VIRTUAL: Final = ("veth", "tun", "bridge", "macvlan")
"""Drivers of interfaces whose frames no hardware segments."""
_SEGMENTING: Final[tuple[str, ...]] = ("tso", "gso")
_OF_BMV2: Final = ("tso", "gso", "gro", "tx")
"""Offloads with which BMv2 gets frames that are longer than the MTU, or lack their checksum."""


def interfaces(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each of the host's interfaces on the training network, and one for all together."""
    if not subject.nics:
        return
    for nic in subject.nics:
        yield _interface(nic, facts.nics.get(str(nic.ip)))
    nics = [
        (nic, nic_facts)
        for nic in subject.nics
        if (nic_facts := facts.nics.get(str(nic.ip))) and not nic_facts.loopback
    ]
    for nic, nic_facts in nics:
        yield _mtu(subject, nic, nic_facts)
        yield _offloads(subject, nic, nic_facts)
    mtus = {nic_facts.name: nic_facts.mtu for _, nic_facts in nics}
    if len(set(mtus.values())) > 1:
        detail = ", ".join(f"{name} has {mtu}" for name, mtu in mtus.items())
        yield warning("MTU", f"interfaces differ: {detail}", "give all of them the same")
    if len(nics) > 1:
        yield _neighbours([nic_facts for _, nic_facts in nics], facts)


def _interface(nic: Host, nic_facts: NicFacts | None) -> Finding:
    name, switch_port = f"interface {nic.ip}", f"port {nic.port} of switch {nic.switch}"
    if nic_facts is None:
        remedy = (
            f"give it to the interface at {switch_port} (`ip address add`), or correct ip in the job file"
        )
        return failed(name, "not an address of this host", remedy)
    if nic_facts.loopback:
        return skipped(name, "loopback: a job on one machine")
    if not nic_facts.up:
        return failed(name, f"{nic_facts.name} is down", f"ip link set dev {nic_facts.name} up")
    if not nic_facts.carrier:
        return failed(name, f"{nic_facts.name} has no carrier", f"see its cable, and {switch_port}")
    if nic_facts.mac != nic.mac:
        detail = f"{nic_facts.name} has the MAC address {nic_facts.mac}, the job file {nic.mac}"
        return failed(name, detail, "correct mac in the job file: the switch forwards by it")
    return ok(name, f"{nic_facts.name}, up, with the job's MAC address")


def _mtu(subject: Subject, nic: Host, nic_facts: NicFacts) -> Finding:
    switch = subject.switch_of(nic)
    detail, is_shadow = f"{nic_facts.name} has {nic_facts.mtu}", subject.role is Role.SHADOW
    if switch.is_tofino and is_shadow and nic_facts.mtu < switch.mtu:
        why = f"the fabric's is {switch.mtu}, and longer copies are dropped"
        return failed("MTU", f"{detail}, but {why}", f"ip link set dev {nic_facts.name} mtu {switch.mtu}")
    if switch.is_tofino and not is_shadow and nic_facts.mtu > switch.mtu:
        why = f"switch {switch.name} drops what is longer than {switch.mtu}"
        return failed("MTU", f"{detail}, but {why}", f"ip link set dev {nic_facts.name} mtu {switch.mtu}")
    if nic_facts.mtu < ETHERNET:
        why = "trainers' longer segments are dropped" if is_shadow else "short segments cost time"
        remedy = f"ip link set dev {nic_facts.name} mtu {ETHERNET}"
        return warning("MTU", f"{detail}, less than Ethernet's {ETHERNET}: {why}", remedy)
    if switch.is_tofino:
        return ok("MTU", f"{detail}; the fabric's is {switch.mtu}")
    return ok("MTU", f"{detail}; a trainer's must not be above a shadow node's, which this host cannot see")


def _offloads(subject: Subject, nic: Host, nic_facts: NicFacts) -> Finding:
    """Check offloads (design, section 5): BMv2 takes no large segments; elsewhere they save much work."""
    if not nic_facts.offloads:
        return skipped("offloads", f"the driver of {nic_facts.name} does not tell")
    states = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in nic_facts.offloads.items())
    detail = f"{nic_facts.name}: {states}"
    if subject.switch_of(nic).target == "bmv2":
        wrong = [name for name in _OF_BMV2 if nic_facts.offloads.get(name)]
        if not wrong:
            return ok("offloads", detail)
        remedy = f"ethtool -K {nic_facts.name} {' '.join(f'{name} off' for name in wrong)}"
        if nic_facts.driver in _VIRTUAL:
            return failed("offloads", f"{detail}; BMv2 cannot forward such segments", remedy)
        return warning("offloads", f"{detail}; BMv2 needs frames as long as on a wire", remedy)
    required = _SEGMENTING
    if subject.role is Role.SHADOW:
        required = (
            () if nic_facts.driver in _VIRTUAL else ("gro",)
        )  # between those, segments come as large as sent
    slow = [name for name in required if nic_facts.offloads.get(name) is False]
    if slow:
        remedy = f"ethtool -K {nic_facts.name} {' '.join(f'{name} on' for name in slow)}"
        return warning("offloads", f"{detail}; each segment costs the CPU time", remedy)
    return ok("offloads", detail)


def _neighbours(nics: Sequence[NicFacts], facts: Facts) -> Finding:
    """Check ARP and the reverse-path filter of interfaces in one subnet (docs/job.md)."""
    name = "ARP"
    networks = Counter(nic.network for nic in nics if nic.network is not None)
    shared = [nic for nic in nics if nic.network is not None and networks[nic.network] > 1]
    if not shared:
        return skipped(name, "its interfaces are in different subnets")
    allowed = {"arp_ignore": (1, 2), "arp_announce": (2,), "rp_filter": (0, 2)}
    wrong = {
        key: values[-1] if key == "rp_filter" else values[0]
        for key, values in allowed.items()
        if any(_in_force(facts, nic.name, key) not in (*values, None) for nic in shared)
    }
    detail = f"{', '.join(nic.name for nic in shared)} are in one subnet"
    if not wrong:
        return ok(name, f"{detail}, and each answers for its own address")
    remedy = "sysctl -w " + " ".join(f"net.ipv4.conf.all.{key}={value}" for key, value in wrong.items())
    if "rp_filter" in wrong:
        return failed(name, f"{detail}, and rp_filter has the kernel drop what comes for the second", remedy)
    return warning(name, f"{detail}, and answer for each other ({', '.join(wrong)})", remedy)


def _in_force(facts: Facts, device: str, key: str) -> int | None:
    """Return the greater one of an interface's setting and that of all, which the kernel uses."""
    numbers = [facts.number(f"net.ipv4.conf.{name}.{key}") for name in ("all", device)]
    return max((value for value in numbers if value is not None), default=None)


def ring_ports(addresses: Sequence[tuple[str, int]], facts: Facts) -> Finding:
    """Check the ports at which the host's ranks will listen: taken, or such as the kernel gives to others."""
    in_use = [f"{ip}:{port}" for ip, port in addresses if facts.listens(ip, port)]
    if in_use:
        remedy = "right if training runs; else end what uses them: `ss -ltnp`"
        return warning("ports", f"{', '.join(in_use)} in use", remedy)
    first, last = _range(facts.sysctls.get("net.ipv4.ip_local_port_range", ""))
    reserved = [_range(part) for part in facts.sysctls.get("net.ipv4.ip_local_reserved_ports", "").split(",")]
    ports = sorted({port for _, port in addresses})
    free_ports = [
        port for port in ports if first <= port <= last and not any(a <= port <= b for a, b in reserved)
    ]
    if free_ports:
        detail = f"the kernel may give {_spans(free_ports)} to other connections before training starts"
        current = facts.sysctls.get("net.ipv4.ip_local_reserved_ports", "")
        setting = ",".join(filter(None, (current, _spans(free_ports))))
        return warning("ports", detail, f"sysctl -w net.ipv4.ip_local_reserved_ports={setting}")
    return ok("ports", f"{_spans(ports)} free")


def own_ports(subject: Subject, facts: Facts, here: Collection[str], *, runs: bool) -> Finding:
    """Check where a shadow node will listen.

    Args:
        subject: the shadow node.
        facts: what was read of the host.
        here: which of the node's hosts this machine is.
        runs: whether the node answers already.
    """
    assert subject.node is not None
    for host, port in subject.listens:
        if host not in here:
            keys = "mgmt, records and gradients" if subject.by_hosts else "mgmt and records"
            remedy = f"start the node on that host, or correct {keys} in the job file"
            return failed("ports", f"{host}, where it serves at port {port}, is not this host", remedy)
    *before, last = (f"{host}:{port}" for host, port in subject.listens)
    addresses = f"{', '.join(before)} and {last}"
    if runs:
        return ok("ports", f"{addresses}: shadow node {subject.node.id} runs")
    numeric = [(host, port) for host, port in subject.listens if is_numeric(host)]
    in_use = [f"{host}:{port}" for host, port in numeric if facts.listens(host, port)]
    if in_use:
        remedy = f"right if shadow node {subject.node.id} runs; else end what uses it: `ss -ltnp`"
        return warning("ports", f"{' and '.join(in_use)} in use", remedy)
    return ok("ports", f"{addresses} free")


def _range(text: str) -> tuple[int, int]:
    """Return the ends of `32768 60999`, `47000-47007` or `47000`; of nothing, an empty range."""
    ends = [int(part) for part in text.replace("-", " ").split() if part.isdecimal()]
    return (ends[0], ends[-1]) if ends else (1, 0)


def _spans(ports: Sequence[int]) -> str:
    """Return sorted ports as `47000-47003,47008`."""
    spans: list[list[int]] = []
    for port in ports:
        if spans and port == spans[-1][1] + 1:
            spans[-1][1] = port
        else:
            spans.append([port, port])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
