"""The job's schema: what one training job's YAML may say (design, section 6).

Structure only. What must hold between the parts of a job, and between jobs, is in `checks`;
reading files is in `jobs`.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from checkmate import wire

_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_HOST_PORT = re.compile(r"(?P<host>[^:\s]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")

CPU_PORT: Final = 510
"""The CPU port that the program was compiled with (`CPU_PORT` in the P4 source)."""


def _mac(value: object) -> str:
    if not isinstance(value, str) or not _MAC.fullmatch(value.lower()):
        raise ValueError("must be a MAC address such as 02:00:00:00:00:01 (in quotes)")
    mac = value.lower()
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise ValueError("must be a unicast MAC address such as 02:00:00:00:00:01")
    return mac


def _ip(value: object) -> IPv4Address:
    try:
        address = IPv4Address(value) if isinstance(value, (str, IPv4Address)) else None
    except ValueError:
        address = None
    if address is None or address.is_multicast or address.is_unspecified or int(address) == 0xFFFFFFFF:
        raise ValueError("must be a host's IPv4 address such as 10.0.0.1")
    return address


def _host_port(value: str) -> str:
    found = _HOST_PORT.fullmatch(value)
    if not found or not 0 < int(found["port"]) < 65536:
        raise ValueError("must be host:port such as 192.168.0.5:7000")
    return value


def _dscp_bit(value: int) -> int:
    if value not in (1, 2, 4, 8, 16, 32):
        raise ValueError("must be one of the six bits of DSCP: 1, 2, 4, 8, 16 or 32")
    return value


Mac = Annotated[str, BeforeValidator(_mac)]
Ip = Annotated[IPv4Address, BeforeValidator(_ip)]
HostPort = Annotated[str, AfterValidator(_host_port)]
Port = Annotated[int, Field(ge=0, lt=CPU_PORT, strict=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
TcpPort = Annotated[int, Field(ge=1, le=65535, strict=True)]
ShadowNodeId = Annotated[int, Field(ge=0, le=65535, strict=True)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Attachment(_Model):
    """A port of a switch."""

    switch: Name
    port: Port


class Stub(_Model):
    """The address of a switch's stub TCP endpoint."""

    ip: Ip
    mac: Mac
    port: TcpPort


class Tls(_Model):
    """PEM files for the P4Runtime channel; `cert` and `key` where the switch asks for a client's."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _pair(self) -> Tls:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together: give both, or neither")
        return self


class MgmtTls(_Model):
    """PEM files for gRPC between trainers and shadow nodes, both of which prove who they are."""

    ca: Path
    cert: Path
    key: Path


class Switch(_Model):
    """A switch and how its P4Runtime server is reached."""

    name: Name
    target: Literal["softswitch", "bmv2"] = "bmv2"
    address: HostPort
    device_id: Annotated[int, Field(ge=0, lt=1 << 64, strict=True)] = 1
    cpu_port: Literal[510] = CPU_PORT
    stub: Stub
    tls: Tls | None = None


class Fabric(_Model):
    """What jobs share: switches, and the links between them as pairs of ports."""

    switches: Annotated[tuple[Switch, ...], Field(min_length=1)]
    links: tuple[tuple[Attachment, Attachment], ...] = ()


class TagSettings(_Model):
    """How tagged segments are marked."""

    dscp_bit: Annotated[int, Field(strict=True), AfterValidator(_dscp_bit)] = wire.DEFAULT_DSCP_BIT


class Rank(Attachment):
    """A training rank: `rank` is its number in the whole job."""

    rank: Annotated[int, Field(ge=0, strict=True)]
    ip: Ip
    mac: Mac
    mgmt: Annotated[str, Field(min_length=1)]


class DpGroup(_Model):
    """A data-parallel group; its ranks stand in ring order. `shadow_nodes`: by id, default all."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=2)]
    shadow_nodes: Annotated[tuple[ShadowNodeId, ...], Field(min_length=1, max_length=wire.SHADOW_IDS_MAX)] | (
        None
    ) = None


class Nic(Attachment):
    """A shadow node's network interface."""

    ip: Ip
    mac: Mac


class ShadowNode(_Model):
    """A shadow node and its one or two shadow NICs."""

    id: ShadowNodeId
    mgmt: HostPort
    nics: Annotated[tuple[Nic, ...], Field(min_length=1, max_length=2)]


class Job(_Model):
    """One training job."""

    job: Name
    fabric: Fabric
    tag: TagSettings = TagSettings()
    channels: Annotated[int, Field(ge=1, le=wire.CHANNELS_MAX, strict=True)] = 1
    replicas: Annotated[int, Field(ge=1, le=wire.SHADOW_IDS_MAX, strict=True)] = 1
    mgmt_tls: MgmtTls | None = None
    dp_groups: Annotated[tuple[DpGroup, ...], Field(min_length=1)]
    shadow_nodes: Annotated[tuple[ShadowNode, ...], Field(min_length=1)]

    def shadow_list(self, group: int) -> tuple[int, ...]:
        """The shadow nodes, by id, between which a DP group's shards go round."""
        return self.dp_groups[group].shadow_nodes or tuple(node.id for node in self.shadow_nodes)

    def shards(self, group: int) -> int:
        """How many shards, and so shadow ids, a DP group's model has."""
        return len(self.shadow_list(group))

    def holder(self, group: int, shard: int, replication_id: int) -> ShadowNode:
        """Shard `shard`'s holder number `replication_id` (1 .. replicas)."""
        nodes = self.shadow_list(group)
        return self.node(nodes[(shard + replication_id - 1) % len(nodes)])

    def node(self, node_id: int) -> ShadowNode:
        """The shadow node of that id; `KeyError` where the job has none."""
        for node in self.shadow_nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)
