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
MAX_LISTED: Final = 3


@dataclass(frozen=True, slots=True)
class Closure:
    """A stream that a shadow NIC has `closed` or `reset`."""

    switch: str
    how: str
    nic: str
    port: int
    channel: int
    shadow_id: int


def closures_line(closures: Sequence[Closure]) -> str:
    """Return one log line for closures, of one switch and one kind, that came together."""
    first = closures[0]
    nics = list(dict.fromkeys(closure.nic for closure in closures))
    if len(closures) == 1:
        subject = f"shadow NIC {first.nic}:{first.port}"
        streams = f"its stream of channel {first.channel}, shadow id {first.shadow_id}"
    else:
        more = f" and {len(nics) - MAX_LISTED:,} more" if len(nics) > MAX_LISTED else ""
        subject = f"{'shadow NIC' if len(nics) == 1 else 'shadow NICs'} {', '.join(nics[:MAX_LISTED])}{more}"
        streams = counted(len(closures), "stream")
    return (
        f"switch {first.switch}: {subject} {first.how} {streams}: {_WHY[first.how]}; no copies go there "
        "until the node connects: by itself while training runs, else once training has started"
    )
