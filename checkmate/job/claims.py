"""What a job claims for itself alone: addresses, switch ports, and where its shadow nodes serve.

Like `checks`, this works on the valid parts of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from checkmate.job.faults import Path
from checkmate.job.placing import interfaces
from checkmate.job.schema import Attachment, Nic, ShadowNode, Stub, Switch
from checkmate.job.valid_parts import ValidPart, addresses_of, parts, served_at

Kind = Literal["ip", "mac", "port", "service"]


@dataclass(frozen=True)
class Claim:
    """A job's claim on an exclusive resource. `value` of a port: its switch and number; else a text."""

    kind: Kind
    what: str
    value: object
    path: Path
    switch: str | None = None
    """The switch of a stub or a link, which jobs on that switch share."""

    @property
    def key(self) -> object:
        """Identity of the resource. Hosts and NICs share one address space."""
        return self.value if self.kind != "port" else ("port", self.value)

    @property
    def text(self) -> str:
        """The resource as messages name it."""
        return " ".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)


def claims(raw: Any) -> Iterator[Claim]:
    """Yield a job's claims: hosts, shadow NICs, their switch ports, and the addresses of stubs."""
    named = {switch.path: switch.fields.get("name") for switch in parts(raw, Switch, "fabric", "switches")}
    for stub in parts(raw, Stub, "fabric", "switches", "stub"):
        if (name := named.get(stub.path[:-1])) is not None:
            yield from _addresses("stub", stub, name)
    for end in parts(raw, Attachment, "fabric", "links"):
        yield from _port(end, end.fields.get("switch"))
    yield from own_claims(raw)


def own_claims(raw: Any) -> Iterator[Claim]:
    """Yield those of a job's claims that are not of the fabric."""
    for interface in interfaces(raw):
        yield from _addresses("host", interface)
        yield from _port(interface)
    for node in parts(raw, ShadowNode, "shadow_nodes"):
        for field, address in served_at(node):
            yield Claim("service", "shadow node management address", address, (*node.path, field))
    for nic in parts(raw, Nic, "shadow_nodes", "nics"):
        yield from _addresses("shadow NIC", nic)
        yield from _port(nic)


def _addresses(what: str, part: ValidPart, switch: str | None = None) -> Iterator[Claim]:
    for path, address in addresses_of(part):
        yield Claim("ip", f"{what} address", str(address), path, switch)
    if "mac" in part.fields:
        yield Claim("mac", f"{what} address", str(part.fields["mac"]), (*part.path, "mac"), switch)


def _port(part: ValidPart, switch: str | None = None) -> Iterator[Claim]:
    place = part.get("switch", "port")
    if place is not None:
        yield Claim("port", "switch port", place, (*part.path, "port"), switch)
