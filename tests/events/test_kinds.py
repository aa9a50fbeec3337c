"""The table of events: stable names, used by the code, and in the documentation as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkmate.events import kinds
from checkmate.events.kinds import FIELDS, KINDS, Kind

ROOT = Path(__file__).parents[2]
CONSTANTS = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, Kind)}


def test_names_are_words_and_each_field_is_explained() -> None:
    assert len(CONSTANTS) == len(KINDS)
    for name, kind in KINDS.items():
        assert re.fullmatch(r"[a-z]+(\.[a-z]+){1,2}", name)
        assert FIELDS.keys() >= set(kind.fields)
    assert {field for kind in KINDS.values() for field in kind.fields} == FIELDS.keys()


def test_each_event_is_said_somewhere() -> None:
    code = "".join(
        file.read_text()
        for package in ("checkmate", "controlplane")
        for file in (ROOT / package).rglob("*.py")
        if file.name != "kinds.py"
    )
    assert [name for name in CONSTANTS if not re.search(rf"\b{name}\(", code)] == []


def test_no_event_lacks_a_field() -> None:
    with pytest.raises(TypeError, match=r"peer.lost has the fields \('node', 'why'\), not \('node',\)"):
        kinds.PEER_LOST(node=3)


def rows(head: str) -> dict[str, list[str]]:
    """Return the rows of a table of operating.md, by their first cell."""
    lines = (ROOT / "docs" / "operating.md").read_text().partition(f"{head}\n")[2].splitlines()[1:]
    cells = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_documentation_has_this_table() -> None:
    of_kinds = {
        name: [", ".join(f"`{field}`" for field in kind.fields), kind.meaning] for name, kind in KINDS.items()
    }
    assert rows("| event | fields | says |") == of_kinds
    assert rows("| field | is |") == {name: [meaning] for name, meaning in FIELDS.items()}
