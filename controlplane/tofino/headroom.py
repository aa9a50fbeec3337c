"""Headroom: the data that a lossless port must accept after it has asked its peer to pause. Pure.

The sum follows IEEE 802.1Q-2018, Annex N (buffer requirements for PFC), with the terms that SONiC uses for
Tofino (`cfgmgr/buffer_headroom_barefoot.lua` in sonic-swss). In the worst case, all of this arrives after the
threshold is reached, counted as time on the wire:

1. a frame of any class that our side has just begun to send, before the PFC frame;
2. the PFC frame itself;
3. the data in the cable, in both directions: signals travel at 198,000 km/s;
4. the data that the peer sends until it must stop (IEEE 802.3, 31B.3.7: in pause quanta of 512 bits);
5. the data in our own MAC and PHY (IEEE 802.3, clause 80: at most about 123,000 bit times at 100 Gbit/s);
6. a frame that the peer has just begun by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from checkmate.job.tofino.chips import Chip

METRES_PER_SECOND = 198_000_000
ETHERNET = 18  # header and FCS
BETWEEN_FRAMES = 20  # preamble, start delimiter and the shortest gap
SHORTEST_FRAME = 64
QUANTUM = 64  # bytes
BRIDGED = 16  # bytes: the minimum that a program puts in front of a frame between ingress and egress
RESPONSE_QUANTA: Mapping[str, int] = MappingProxyType(
    {"10G": 67, "25G": 80, "40G": 118, "50G": 147, "100G": 394, "200G": 453, "400G": 905}
)
INTERFACE_BITS = 122_880  # at 100 Gbit/s and below


@dataclass(frozen=True)
class Headroom:
    """Bytes on the wire that arrive after the threshold is reached, and the cells that hold them."""

    own_frame: int
    pfc_frame: int
    cable: int
    response: int
    interface: int
    last_frame: int
    cells: int

    @property
    def bytes(self) -> int:
        return self.own_frame + self.pfc_frame + self.cable + self.response + self.interface + self.last_frame

    def arithmetic(self) -> str:
        """Return the sum, term by term."""
        return (
            f"{self.own_frame} (own frame) + {self.pfc_frame} (PFC frame) + {self.cable} (cable, both ways) "
            f"+ {self.response} (peer's response) + {self.interface} (MAC and PHY) + {self.last_frame} "
            f"(peer's frame) = {self.bytes} bytes, {self.cells} cells at worst"
        )


def headroom(speed: str, cable: float, mtu: int, chip: Chip) -> Headroom:
    """Return the headroom of a port.

    Args:
        speed: The port's speed, such as `100G`.
        cable: Length of the cable, in metres.
        mtu: The hosts' MTU, in bytes.
        chip: The switch's chip.
    """
    bits_per_second = int(speed.removesuffix("G")) * 10**9
    frame = mtu + ETHERNET + BETWEEN_FRAMES
    faster = max(1, bits_per_second // 10**11)
    parts = (
        frame,
        SHORTEST_FRAME + BETWEEN_FRAMES,
        _round_up(2 * cable * bits_per_second, 8 * METRES_PER_SECOND),
        RESPONSE_QUANTA[speed] * QUANTUM,
        INTERFACE_BITS * faster // 8,
        frame,
    )
    cells, wire = _worst_frame(mtu, chip.cell_bytes)
    return Headroom(*parts, cells=_round_up(sum(parts) * cells, wire))


def frame_cells(frame: int, chip: Chip) -> int:
    """Return the number of cells for one frame of `frame` bytes, FCS included."""
    return _round_up(frame + BRIDGED, chip.cell_bytes)


@cache
def _worst_frame(mtu: int, cell_bytes: int) -> tuple[int, int]:
    """Return (cells, bytes on the wire) of the frame length with the most cells per byte on the wire."""
    lengths = range(SHORTEST_FRAME, mtu + ETHERNET + 1)
    worst = max(lengths, key=lambda s: _round_up(s + BRIDGED, cell_bytes) / (s + BETWEEN_FRAMES))
    return _round_up(worst + BRIDGED, cell_bytes), worst + BETWEEN_FRAMES


def _round_up(numerator: float, denominator: int) -> int:
    return int(-(-numerator // denominator))
