"""A commented job file to start from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from checkmate.base.wording import counted
from checkmate.job.addresses import checked_host, checked_host_port
from checkmate.job.fields import NODE_IDS_LAST, RANKS_LAST
from checkmate.job.host_copies import RankMesh
from checkmate.job.tofino import chips

SCHEMA_FILE: Final = "job.schema.json"
"""The JSON Schema beside the job file, which editors read."""
_BLOCK: Final = 1 << 8
"""Addresses of ranks, and then those of shadow nodes, begin at a multiple of it in the training network."""
_STUB: Final = 255 << 8
"""Offset of the stub's address."""
_PORT: Final = 7000
"""Of shadow nodes' gRPC."""
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


@dataclass(frozen=True)
class HostCopiesStart:
    """What a job file with copies by hosts begins with: ranks or a mesh; `shadow_nodes`: host:port."""

    job: str
    ranks: int | None
    mesh: RankMesh | None
    shadow_nodes: Sequence[str]
    replicas: int
    keys: str


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


def number_of_ranks(text: str) -> int | None:
    """Return the number of a job's ranks; "" is none. Raise `ValueError` for anything else."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= RANKS_LAST + 1):
        raise ValueError(
            f"must be the number of all ranks, from 1 to {RANKS_LAST + 1:,}: with copies by hosts, "
            "the file has no hosts of ranks"
        )
    return int(text)


def rank_mesh(text: str) -> RankMesh | None:
    """Return the mesh of `dp_replicate=2,dp_shard=8`; "" is none. Raise `ValueError` for anything else."""
    if not text:
        return None
    pairs = [part.strip().partition("=")[::2] for part in text.split(",")]
    sizes = {name: int(size) for name, size in pairs if size.isascii() and size.isdecimal() and int(size)}
    dimensions = list(RankMesh.__dataclass_fields__)
    if len(sizes) < len(pairs) or not sizes.keys() <= set(dimensions):
        raise ValueError(
            f"must be sizes of {', '.join(dimensions[:-1])} or {dimensions[-1]}, such as "
            f"dp_replicate=2,dp_shard=8, not {text}"
        )
    return RankMesh(**sizes)


def node_addresses(text: str) -> list[str]:
    """Return the host:port of shadow nodes, given by hosts with or without ports, or by their number."""
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= NODE_IDS_LAST:
        return list(map(_placeholder, range(int(text))))
    try:
        return [_with_port(name.strip()) for name in text.split(",")]
    except ValueError:
        raise ValueError(
            "must be the number of shadow nodes, or their hosts, such as shadow0,shadow1 or "
            f"127.0.0.1:7000,127.0.0.1:7010, not {text}"
        ) from None


def _placeholder(node: int) -> str:
    return f"shadow{node}:{_PORT}"


def _with_port(host: str) -> str:
    try:
        address = checked_host(host)
    except ValueError:
        return checked_host_port(host)
    return _host_port(address)


def _host_port(host: str) -> str:
    return f"[{host}]:{_PORT}" if ":" in host else f"{host}:{_PORT}"


def text(start: JobStart | HostCopiesStart, file: str) -> str:
    """Return the content of a job file with that name. Raise `ValueError` if one switch has too few ports."""
    if isinstance(start, HostCopiesStart):
        return "\n".join([*_host_copies(start, file), ""])
    nics = len(start.shadow_nodes) * start.nics
    if (ports := len(start.ranks) + nics) > _PORTS and not start.has_front_panel:
        raise ValueError(
            f"{counted(len(start.ranks), 'host')} of ranks and {counted(nics, 'NIC')} of shadow nodes need "
            f"{ports:,} ports, and one switch has {_PORTS}. For more switches, write a file with fewer, and "
            "copy its switch (`checkmate docs job`)"
        )
    trainers = _mesh(start) if start.gpus_per_host > 1 else _ranks(start)
    return "\n".join([*_head(start, file), *trainers, *_nodes(start), *_fabric(start), ""])


def _host_copies(start: HostCopiesStart, file: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={SCHEMA_FILE}"
    yield "# A training job whose ranks send their gradients to shadow nodes themselves. Check it:"
    yield f"#   checkmate validate {file}"
    yield ""
    yield f"job: {start.job}"
    yield "copies: host   # each of n ranks sends 1/n of the reduced gradients, over any network"
    if start.ranks is not None:
        yield f"ranks: {start.ranks}   # all that torchrun starts; or a mesh, if the model is sharded (below)"
    if start.mesh is None:
        yield "# mesh: {dp_replicate: 2, dp_shard: 8}   # instead of ranks"
    else:
        sizes = (f"{name}: {size}" for name, size in vars(start.mesh).items() if size > 1)
        yield f"mesh: {{{', '.join(sizes) or 'dp_replicate: 1'}}}   # of all ranks, as torch's DeviceMesh"
    yield f"replicas: {start.replicas}   # shadow nodes that hold each shard; with 2, one of them may die"
    yield f"keys: {start.keys}   # the folder in which `checkmate keys {file}` makes keys"
    yield ""
    yield "# Shadow nodes: CPU machines, or this one. mgmt: host and port of gRPC; step records use the next"
    yield "# port, and gradients the one after it, unless `gradients` names another host:port of the node."
    yield "shadow_nodes:"
    for node, address in enumerate(start.shadow_nodes):
        mark = "   # (*)" if address == _placeholder(node) else ""
        yield f"  - id: {node}"
        yield f"    mgmt: {_quoted(address)}{mark}"


def _head(start: JobStart, file: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={SCHEMA_FILE}"
    yield "# A training job. Replace what is marked (*) by your own addresses and ports, then check it:"
    yield f"#   checkmate validate {file}"
    yield ""
    yield f"job: {start.job}"
    yield f"collective: {start.collective}   # reduces gradients: ring or tree (Checkmate's own), or nccl"
    yield "copies: switch   # gradients; with host, ranks send them (`checkmate init --copies host`)"
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
    if start.collective != "nccl":
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
        yield f"    mgmt: {_quoted(_host_port(host))}"
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
