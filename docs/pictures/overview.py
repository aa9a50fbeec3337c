"""Draw overview.svg, the README's diagram, and overview-tall.svg, the site's on phones.

Usage: `python docs/pictures/overview.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from svg import arrow, box, text, write

FOLDER: Final = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
RANKS: Final = ["PyTorch DDP", "ring AllReduce over TCP", "tagged by eBPF"]
SWITCH: Final = ["forwards everything", "copies tagged segments"]
NODES: Final = ["CPU machines", "receive, step, serve", "the checkpoint"]
CONTROLLER: Final = ["checkmate run"]
DISK: Final = ["PyTorch checkpoints"]
MANAGEMENT: Final = ("seeds and step records;", "after a failure, the state to resume from")


TITLE: Final = (
    "The switch copies tagged gradients of the training ranks to shadow nodes, which hold the checkpoint"
)


def main() -> None:
    """Write the picture, and a tall one for phones."""
    wide = [
        box(20, 60, 200, 110, "training ranks", RANKS),
        box(400, 60, 160, 110, "P4 switch", SWITCH),
        box(740, 60, 200, 110, "shadow nodes", NODES),
        box(400, 240, 160, 60, "controller", CONTROLLER),
        box(740, 240, 200, 60, "disk", DISK),
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
        text(480, 18, f"management network: {MANAGEMENT[0]} {MANAGEMENT[1]}", "label"),
    ]
    write(FOLDER / "overview.svg", 960, 320, TITLE, wide)
    below = ("dashed, the management network:", *MANAGEMENT)
    tall = [
        box(40, 10, 190, 90, "training ranks", RANKS),
        box(40, 160, 190, 80, "P4 switch", SWITCH),
        box(40, 295, 190, 90, "shadow nodes", NODES),
        box(265, 25, 115, 60, "controller", CONTROLLER),
        box(40, 435, 190, 55, "disk", DISK),
        arrow([(60, 100), (60, 160)]),
        text(68, 134, "tagged gradients", "label", "start"),
        arrow([(205, 160), (205, 100)]),
        text(213, 134, "training copy", "label", "start"),
        arrow([(135, 240), (135, 295)]),
        text(145, 272, "shadow copies, TCP", "label", "start"),
        arrow([(322, 85), (322, 200), (230, 200)]),
        text(314, 192, "P4Runtime", "label", "end"),
        arrow([(135, 385), (135, 435)]),
        text(145, 415, "checkmate consolidate", "label", "start"),
        arrow([(40, 55), (16, 55), (16, 340), (40, 340)], dashed=True, both=True),
        *(text(16, 515 + 18 * row, line, "label", "start") for row, line in enumerate(below)),
    ]
    write(FOLDER / "overview-tall.svg", 390, 565, TITLE, tall)


if __name__ == "__main__":
    main()
