"""A program's strings and numbers never become code: a mutated one is refused, or makes no difference."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from finsy.proto import p4i
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from softswitch.codegen import functions, vocabulary
from softswitch.codegen.program import Program, UnsupportedProgramError, _compile, load
from softswitch.program.trace import Trace
from tests.softswitch.support.scenarios import CHECKMATE, EXAMPLES, ROOT, files
from tests.support.fuzz import damaged, fuzz

TNA = ROOT / "p4src" / "build" / "tna"
PROGRAMS = {"bmv2": CHECKMATE, "ingress": TNA / "ingress", "egress": TNA / "egress"}
SAMPLES = 1
"""Leaves of each kind that the quick walk changes."""
Place = tuple[str | int, ...]

TEXTS: list[Any] = [
    "x\n    __import__('os').system('id')\n#",
    "');__import__('os').system('id')#",
    "__import__('os').system('id')",
    "True or frame.clear()",
    "",
    "0x1\n",
    "ä\u2028\x00'\\",
    7,
    {"type": "bool", "value": "frame.clear()"},
]
NUMBERS: list[Any] = ["__import__('os')", "1\nimport os", None, 1.5, True, -1, 1 << 80, [1], {}]


def leaves(item: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the places of all strings, numbers and truth values."""
    if isinstance(item, dict):
        for name, value in item.items():
            yield from leaves(value, (*place, name))
    elif isinstance(item, list):
        for number, value in enumerate(item):
            yield from leaves(value, (*place, number))
    elif item is not None:
        yield place


def kind(raw: Any, place: Place) -> str:
    """Return what a leaf means: its place without numbers, and the kind of its operand."""
    parent = raw
    for step in place[:-1]:
        parent = parent[step]
    operand_type = parent.get("type", "") if isinstance(parent, dict) and place[-1] == "value" else ""
    return ".".join(str(step) for step in place if isinstance(step, str)) + f":{operand_type}"


def with_change(raw: Any, place: Place, value: Any) -> Any:
    """Return a copy of a JSON with another value at a place."""
    if not place:
        return value
    copy: Any = dict(raw) if isinstance(raw, dict) else list(raw)
    copy[place[0]] = with_change(raw[place[0]], place[1:], value)
    return copy


def at(raw: Any, place: Place) -> Any:
    for step in place:
        raw = raw[step]
    return raw


def sources(program: Program) -> tuple[str, ...]:
    """Return both variants of the code, with identifiers numbered in their order.

    Texts have one identifier: only traces show them, and equal ones share a number.
    """
    numbers: dict[str, str] = {}

    def renamed(word: re.Match[str]) -> str:
        return "text" if word[0].startswith("text_") else numbers.setdefault(word[0], f"v{len(numbers)}")

    return tuple(
        re.sub(r"\b[a-z]+(?:_[a-z]+)?_\d+\b", renamed, source)
        for source in (program.source, _compile(program._plan, traced=True)[0])
    )


@cache
def original(name: str) -> tuple[Any, p4i.P4Info]:
    config, p4info = files(PROGRAMS[name])
    return json.loads(config), p4info


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate once, without omissions: all code that any round has."""
    monkeypatch.setattr(functions, "MAX_ROUNDS", 1)


def verdict(name: str, place: Place, value: Any, expected: tuple[str, ...]) -> str:
    """Load a program with one change; return `refused`, `equal` or `other`."""
    raw, p4info = original(name)
    try:
        code = sources(load(json.dumps(with_change(raw, place, value)).encode(), p4info))
    except (ValueError, UnsupportedProgramError):
        return "refused"
    return "equal" if code == expected else "other"


def walk(name: str, most: int | None) -> None:
    """Change the leaves, at most some of each kind, to everything hostile."""
    raw, p4info = original(name)
    expected = sources(load(json.dumps(raw).encode(), p4info))
    counts: dict[str, int] = {}
    verdicts: dict[str, int] = {}
    for place in leaves(raw):
        leaf_kind = kind(raw, place)
        counts[leaf_kind] = counts.get(leaf_kind, 0) + 1
        if most is not None and counts[leaf_kind] > most:
            continue
        old = at(raw, place)
        hostile = TEXTS if isinstance(old, str) else NUMBERS
        for value in (hostile[counts[leaf_kind] % 4], hostile[4 + counts[leaf_kind] % 5]):
            outcome = verdict(name, place, value, expected)
            verdicts[outcome] = verdicts.get(outcome, 0) + 1
            # Another number or truth value may be another program, in the same words.
            assert outcome != "other" or type(old) is type(value) in (int, bool), (place, value)
    assert verdicts["refused"] > 50
    assert verdicts["equal"] > 50


@pytest.mark.slow
def test_hostile_leaves_of_each_kind() -> None:
    walk("bmv2", SAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_leaf_with_everything_hostile(name: str) -> None:
    walk(name, None)


anything = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["0x0", "-0x1", "$valid$", "scalars", "ipv4", "field", "bool", "drop"]),
    st.integers(-2, 70),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
)


@fuzz(60, data=st.data())
def test_any_change_gives_a_refusal_or_a_program_in_the_same_words(data: st.DataObject) -> None:
    raw, p4info = original("bmv2")
    kinds: dict[str, list[Place]] = {}
    for place in leaves(raw):
        kinds.setdefault(kind(raw, place), []).append(place)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(data.draw(st.sampled_from(sorted(kinds.items())))[1]))
        raw = with_change(raw, place, data.draw(anything))
    try:
        program = load(json.dumps(raw).encode(), p4info)
    except (ValueError, UnsupportedProgramError):
        return
    vocabulary.check(ast.parse(program.source))


@fuzz(40, data=st.data())
def test_any_p4info_gives_a_refusal_or_a_program_in_the_same_words(data: st.DataObject) -> None:
    raw, p4info = original("bmv2")
    try:
        changed_info = p4i.P4Info.FromString(damaged(data, p4info.SerializeToString(deterministic=True)))
    except DecodeError:
        return
    try:
        program = load(json.dumps(raw).encode(), changed_info)
    except (ValueError, UnsupportedProgramError):
        return
    vocabulary.check(ast.parse(program.source))


def test_a_truth_value_is_no_source_and_a_name_no_comment(tmp_path: Path) -> None:
    """Two inputs that once ran code as the switch's user: text of a truth value, and the end of a comment."""
    config, p4info = files(EXAMPLES / "counter")
    mark = tmp_path / "executed"
    attack = f"open({str(mark)!r}, 'w').close()"
    raw = json.loads(config)
    for action in raw["actions"]:
        for primitive in action["primitives"]:
            if primitive["op"] == "assign":
                primitive["parameters"][1] = {"type": "bool", "value": attack}
    with pytest.raises(ValueError, match="must be true or false"):
        load(json.dumps(raw).encode(), p4info)
    p4info = p4i.P4Info.FromString(p4info.SerializeToString())
    text, evil = config.decode(), f"x\\n                {attack}\\n#"
    for info in p4info.actions:
        old = info.preamble.name
        info.preamble.name = json.loads(f'"{evil}"') + old
        text = text.replace(f'"{old}"', f'"{evil}{old}"')
    program = load(text.encode(), p4info)
    program.process(1, bytes(100), Trace())
    program.process(1, bytes(100))
    assert not mark.exists()
    assert "open" not in program.source


def test_the_vocabulary_has_no_foreign_words() -> None:
    program = load(*files(CHECKMATE))
    vocabulary.check(ast.parse(program.source))
    for foreign in ("open()", "x", "text_1.system", "'text'", "import os", "lambda: 0", "f'{at}'", "1.5"):
        with pytest.raises(vocabulary.ForeignCodeError):
            vocabulary.check(ast.parse(foreign))
