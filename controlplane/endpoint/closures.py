"""Ends of shadow nodes' streams, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from checkmate.wording import counted

_WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "closed": "the node was stopped, training starts again, or the node joins again after a gap",
        "reset": "the node died, or its connection broke",
    }
)
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Closure:
    """A stream that a shadow NIC has `closed` or `reset`."""

    switch: str
    how: str
    nic: str
    port: int
    channel: int
    shadow_id: int


def closures_line(found: Sequence[Closure]) -> str:
    """Return one log line for closures, of one switch and one kind, that came together."""
    first = found[0]
    nics = list(dict.fromkeys(one.nic for one in found))
    if len(found) == 1:
        who = f"shadow NIC {first.nic}:{first.port}"
        what = f"its stream of channel {first.channel}, shadow id {first.shadow_id}"
    else:
        more = f" and {len(nics) - _SHOWN:,} more" if len(nics) > _SHOWN else ""
        who = f"{'shadow NIC' if len(nics) == 1 else 'shadow NICs'} {', '.join(nics[:_SHOWN])}{more}"
        what = counted(len(found), "stream")
    return (
        f"switch {first.switch}: {who} {first.how} {what}: {_WHY[first.how]}; no copies go there "
        "until the node connects: by itself while training runs, else once training has started"
    )
