"""Residual checksums in checkmate_tna.p4: its parser subtracts fields, and its deparser adds others.

The embedded target cannot run these lines, so they are read from the source, and computed in Python.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings

from p4src import ROOT
from softswitch.codegen.program import Program
from tests.softswitch.support.scenarios import checkmate_program
from tests.support.p4.frames import Frame, connected, ones_sum

SOURCE = (ROOT / "checkmate_tna.p4").read_text()
STARTS = {"ipv4": 14, "tcp": 34}


def expanded(text: str) -> list[str]:
    """Return the fields of a list, `header.field` each, with its macros expanded."""
    macros = dict(re.findall(r"#define (\w+)\(hdr\) ((?:.*\\\n)*.*)", SOURCE))
    while names := [name for name in macros if f"{name}(hdr)" in text]:
        text = text.replace(f"{names[0]}(hdr)", macros[names[0]].replace("\\\n", " "))
    return [name.strip().removeprefix("hdr.") for name in text.split(",")]


def part(kind: str, name: str) -> str:
    """Return the source of a parser, control or state, up to its closing brace."""
    (match,) = re.findall(rf"^( *){kind} {name}\b.*?\{{\n(.*?)^\1\}}", SOURCE, re.MULTILINE | re.DOTALL)
    return str(match[1])


def layout(header: str) -> dict[str, tuple[int, int]]:
    """Return first bit and width of each field of a header."""
    text = (ROOT / "include" / "headers.p4").read_text()
    (body,) = re.findall(rf"^header {header}_t \{{(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    places, at = {}, 0
    for width, name in re.findall(r"bit<(\d+)>\s+(\w+);", body):
        places[name] = at, int(width)
        at += int(width)
    return places


def total(frame: bytes, fields: list[str], starts: dict[str, int]) -> int:
    """Return the ones' complement sum over fields, in the order of the list."""
    bits = ""
    for field in fields:
        header, name = field.split(".")
        first, width = layout(header)[name]
        whole = "".join(f"{byte:08b}" for byte in frame[starts[header] :][:20])
        bits += whole[first : first + width]
    assert len(bits) % 16 == 0, fields
    return ones_sum(int(bits, 2).to_bytes(len(bits) // 8, "big"))


def subtracted(engine: str, path: tuple[str, ...]) -> list[list[str]]:
    """Return the lists that a checksum engine subtracts in these states."""
    parser = part("parser", "checkmate_egress_parser")
    states = dict(re.findall(r"^    state (\w+) \{\n(.*?)^    \}", parser, re.MULTILINE | re.DOTALL))
    calls = [re.findall(rf"\b{engine}\.subtract\(\{{(.*?)\}}\)", states[name]) for name in path]
    assert (
        f"{engine}.subtract_all_and_deposit(local.{engine.removesuffix('_sum')}_residual)" in states[path[-1]]
    )
    return [expanded(text) for lists in calls for text in lists]


def mended(header: str, frame: bytes, copy: bytes) -> int:
    """Return Tofino's checksum of a copy."""
    engine = f"{header}_sum"
    timestamps = frame[46] >> 4 == 12
    starts = {**STARTS, "timestamps": 54, "tag": 66 if timestamps else 54}
    path = ("ethernet", "tcp", *(("timestamps",) if timestamps else ()), "tag")
    lists = subtracted(engine, path)
    residual = 0xFFFF - ones_sum(
        b"".join(total(frame, fields, starts).to_bytes(2, "big") for fields in lists)
    )
    deparser = part("control", "checkmate_egress_deparser")
    (update,) = re.findall(rf"hdr\.{header}\.checksum = {engine}\.update\(\{{(.*?)\}}\)", deparser)
    *fields, last = expanded(update)
    assert last == f"local.{header}_residual"
    new = total(copy, fields, starts)
    return 0xFFFF - ones_sum(new.to_bytes(2, "big") + residual.to_bytes(2, "big"))


@pytest.fixture(scope="module")
def v1model() -> Program:
    return checkmate_program()


@settings(max_examples=60)
@given(connected)
def test_residual_checksums_are_those_that_v1model_computes(v1model: Program, frame: Frame) -> None:
    original = frame.encode()
    copy = v1model.process(1, original)[0].frame
    assert mended("ipv4", original, copy) % 0xFFFF == int.from_bytes(copy[24:26], "big") % 0xFFFF
    assert mended("tcp", original, copy) % 0xFFFF == int.from_bytes(copy[50:52], "big") % 0xFFFF
