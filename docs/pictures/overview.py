"""Draw overview.svg, the README's diagram: `python docs/pictures/overview.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from svg import arrow, box, text, write

FOLDER: Final = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
MANAGEMENT: Final = "management network: seeds and step records; after a failure, the state to resume from"


def main() -> None:
    """Write the picture."""
    parts = [
        box(20, 60, 200, 110, "training ranks", ["PyTorch DDP", "ring AllReduce over TCP", "tagged by eBPF"]),
        box(400, 60, 160, 110, "P4 switch", ["forwards everything", "copies tagged segments"]),
        box(740, 60, 200, 110, "shadow nodes", ["CPU machines", "receive, step, serve", "the checkpoint"]),
        box(400, 240, 160, 60, "controller", ["checkmate run"]),
        box(740, 240, 200, 60, "disk", ["PyTorch checkpoints"]),
        arrow([(220, 95), (400, 95)]),
        text(310, 86, "tagged gradients", "label"),
        arrow([(400, 135), (220, 135)]),
        text(310, 152, "training copy", "label"),
        arrow([(560, 115), (740, 115)]),
        text(650, 106, "shadow copies, TCP", "label"),
        arrow([(480, 240), (480, 170)]),
        text(490, 210, "P4Runtime", "label", "start"),
        arrow([(840, 170), (840, 240)]),
        text(830, 210, "checkmate consolidate", "label", "end"),
        arrow([(120, 60), (120, 25), (840, 25), (840, 60)], dashed=True, both=True),
        text(480, 18, MANAGEMENT, "label"),
    ]
    write(
        FOLDER / "overview.svg",
        960,
        320,
        "The switch copies tagged gradients of the training ranks to shadow nodes, which hold the checkpoint",
        parts,
    )


if __name__ == "__main__":
    main()
