"""A commented job file to start from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from checkmate.base.wording import counted
from checkmate.job.tofino import chips

SCHEMA_FILE: Final = "job.schema.json"
"""The JSON Schema beside the job file, which editors read."""
_BLOCK: Final = 1 << 8
"""Addresses of ranks, and then those of shadow nodes, begin at a multiple of it in the training network."""
_STUB: Final = 255 << 8
"""Offset of the stub's address."""
_HOSTS_MAX: Final = 500
_PORTS: Final = 509
"""Of one switch, which is what the file has, from 1 on."""


@dataclass(frozen=True)
class JobStart:
    """What a job file begins with. `ranks` and `shadow_nodes`: their hosts on the management network.

    With several GPUs per host, `ranks` are the hosts, and the file has a mesh.
    """

    job: str
    ranks: Sequence[str]
    gpus_per_host: int
    shadow_nodes: Sequence[str]
    nics: int
    collective: str
    channels: int
    replicas: int
    target: str
    switch: str
    """The address of the switch's P4Runtime server."""
    network: IPv4Network
    """The training network, of at least 65,536 addresses."""
    keys: str

    @property
    def has_front_panel(self) -> bool:
        """Whether ports are front-panel names."""
        return self.target.startswith("tofino")


def hosts(text: str, prefix: str, least: int = 1) -> list[str]:
    """Return hosts that are given as names with commas, or as a number.

    Raise `ValueError` for neither, and for fewer than `least`.
    """
    if text.isascii() and text.isdecimal() and least <= int(text) <= _HOSTS_MAX:
        return [f"{prefix}{number}" for number in range(int(text))]
    names = [name.strip() for name in text.split(",")]
    if text.lstrip("-").isdecimal() or not all(names) or not least <= len(names) <= _HOSTS_MAX:
        raise ValueError(
            f"must be a number from {least} to {_HOSTS_MAX}, as the ports of one switch hold, or hosts "
            f"such as {prefix}0,{prefix}1. For more switches, copy the one of the file (`checkmate docs job`)"
        )
    lower = [name.lower() for name in names]  # as DNS has it
    if again := list(dict.fromkeys(name for name in names if lower.count(name.lower()) > 1)):
        raise ValueError(f"has {', '.join(again)} more than once: each must be a host of its own")
    return names


def text(start: JobStart, file: str) -> str:
    """Return the content of a job file with that name. Raise `ValueError` if one switch has too few ports."""
    nics = len(start.shadow_nodes) * start.nics
    if (ports := len(start.ranks) + nics) > _PORTS and not start.has_front_panel:
        raise ValueError(
            f"{counted(len(start.ranks), 'host')} of ranks and {counted(nics, 'NIC')} of shadow nodes need "
            f"{ports:,} ports, and one switch has {_PORTS}. For more switches, write a file with fewer, and "
            "copy its switch (`checkmate docs job`)"
        )
    trainers = _mesh(start) if start.gpus_per_host > 1 else _ranks(start)
    return "\n".join([*_head(start, file), *trainers, *_nodes(start), *_fabric(start), ""])


def _head(start: JobStart, file: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={SCHEMA_FILE}"
    yield "# A training job. Replace what is marked (*) by your own addresses and ports, then check it:"
    yield f"#   checkmate validate {file}"
    yield ""
    yield f"job: {start.job}"
    yield f"collective: {start.collective}   # reduces gradients: ring (Checkmate's own), or nccl on GPUs"
    yield f"channels: {start.channels}   # of the ring, 1 to 8; each has streams of its own"
    yield f"replicas: {start.replicas}   # shadow nodes that hold each shard"
    yield f"keys: {start.keys}  # the folder in which `checkmate keys {file}` makes keys"
    yield ""


def _ranks(start: JobStart) -> Iterator[str]:
    yield "# Trainers. ip and mac (*): on the training network; mgmt: on the management network."
    yield "dp_groups:  # one for each pipeline stage; for hosts with several ranks, see `checkmate docs job`"
    yield "  - ranks:  # in the order of the ring, each with its port of the switch (*)"
    for rank, host in enumerate(start.ranks):
        yield f"      - {{rank: {rank}, {_nic(start, rank + 1, rank + 1)}, mgmt: {_quoted(host)}}}"
    yield ""


def _mesh(start: JobStart) -> Iterator[str]:
    ranks = len(start.ranks) * start.gpus_per_host
    yield "# Each host has the ranks of one replica, sharded by FSDP2. Other meshes: `checkmate docs job`."
    if start.collective == "ring":
        yield f"# Plain DDP over all ranks has `mesh: {{dp_replicate: {ranks}}}` instead."
    yield f"mesh: {{dp_replicate: {len(start.ranks)}, dp_shard: {start.gpus_per_host}}}"
    yield f"gpus_per_host: {start.gpus_per_host}"
    yield "# Trainers, in the order of ranks. mgmt: on the management network."
    yield "hosts:"
    for number, host in enumerate(start.ranks):
        yield f"  - name: {_quoted(host)}"
        yield f"    mgmt: {_quoted(host)}"
        yield "    nics:  # on the training network, one or more, ip, mac and port (*)"
        yield f"      - {{{_nic(start, number + 1, number + 1)}}}"
    yield ""


def _nodes(start: JobStart) -> Iterator[str]:
    yield "# Shadow nodes. mgmt: host and port of gRPC; step records use the next port."
    yield "shadow_nodes:"
    for node, host in enumerate(start.shadow_nodes):
        yield f"  - id: {node}"
        yield f"    mgmt: {_quoted(f'[{host}]:7000' if ':' in host else f'{host}:7000')}"
        yield "    nics:  # one or two, ip, mac and port (*)"
        for nic in range(start.nics):
            number = node * start.nics + nic
            address = _BLOCK * -(-(len(start.ranks) + 1) // _BLOCK) + number + 1
            yield f"      - {{{_nic(start, address, len(start.ranks) + number + 1)}}}"
    yield ""


def _fabric(start: JobStart) -> Iterator[str]:
    yield "# Switches. Jobs that share them name one file instead: `fabric: fabric.yaml`, with what is below."
    yield "fabric:"
    yield "  switches:"
    yield "    - name: tor"
    yield f"      target: {start.target}"
    if start.target == "tofino":
        yield "      front_panel: wedge100bf-32x-odd  # the board (*)"
    elif start.has_front_panel:
        yield "      ports:  # the device port of each port (*)"
        ports = len(start.ranks) + len(start.shadow_nodes) * start.nics
        yield from (f"        {number + 1}/0: {_device_port(number)}" for number in range(ports))
    yield f"      address: {_quoted(start.switch)}  # of its P4Runtime server"
    stub = f"ip: {start.network[_STUB + 1]}, mac: {_mac(_STUB + 1)}, port: 7471"
    yield "      # An unused address of the training network, to which shadow nodes connect (*)."
    yield f"      stub: {{{stub}}}"
    yield "      # tls: {ca: ca.pem, cert: client.pem, key: client.key}  # for P4Runtime"


def _device_port(connector: int) -> int:
    """Return the device port of a Tofino 2's connector, if the board numbers them in order."""
    chip = chips.CHIPS["tofino2"]
    pipe, place = divmod(connector, (chip.last_front + 1 - chip.first_front) // chip.lanes)
    return pipe << 7 | chip.first_front + place * chip.lanes


def _nic(start: JobStart, address: int, port: int) -> str:
    at = f'"{port}/0"' if start.has_front_panel else str(port)
    return f"ip: {start.network[address]}, mac: {_mac(address)}, switch: tor, port: {at}"


def _mac(number: int) -> str:
    return f'"02:00:00:00:{number >> 8:02x}:{number & 0xFF:02x}"'


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
