"""Small labs: the data of their YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def on_one_switch(
    ranks: int, nics: Sequence[int], *, channels: int = 1, replicas: int = 1, collective: str = "ring"
) -> dict[str, Any]:
    """Return a ring and shadow nodes with these numbers of NICs, all on the switch `tor`."""
    return {
        "title": f"a ring of {ranks} on a switch",
        "channels": channels,
        "replicas": replicas,
        **({} if collective == "ring" else {"collective": collective, "tree_bytes": 262144}),
        "switches": ["tor"],
        "dp_groups": [{"ranks": ["tor"] * ranks}],
        "shadow_nodes": [["tor"] * count for count in nics],
    }
