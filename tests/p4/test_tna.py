"""checkmate_tna.p4 processes packets like checkmate_v1model.p4.

The former runs on the embedded target as two halves (see ptf_tests/stage/tna.py); hypothesis generates
packets. The PTF suites run on it too (tests/ptf/test_suites.py). Checksums are compared with full
recomputation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptf_tests.stage.tna import TnaProgram, device_config, load_halves
from softswitch.codegen.program import Program
from softswitch.program.state import CounterCell, Entry
from softswitch.program.trace import Trace
from tests.softswitch.support.scenarios import (
    CHECKMATE,
    CPU_PORT,
    checkmate_frames,
    checkmate_last,
    checkmate_program,
    files,
)
from tests.support.fuzz import fuzz
from tests.support.p4.frames import PORTS, TAG, Frame, arrivals, connected, ones_sum, packet_outs


def tna_program(like: Program) -> TnaProgram:
    """Return the Tofino program's halves with another program's entries and groups."""
    program = load_halves(device_config(), files(CHECKMATE)[1])
    for table, entry in like.state.all_entries():
        program.state.tables[table.id].insert(Entry(entry.match, entry.action, entry.params, entry.priority))
    program.state.groups.update(like.state.groups)
    return program


def counts(program: Program) -> Iterator[tuple[object, CounterCell]]:
    """Yield every counter cell, with its table or index."""
    for table, entry in program.state.all_entries():
        yield (table.id, entry.match), entry.count
    for number_, cells in program.state.counters.items():
        for index, cell in enumerate(cells):
            yield (number_, index), cell


@pytest.fixture(scope="module")
def programs() -> tuple[Program, TnaProgram]:
    v1model = checkmate_program()
    return v1model, tna_program(v1model)


def test_the_halves_have_every_table_and_counter_between_them(programs: tuple[Program, TnaProgram]) -> None:
    v1model, tna = programs
    assert set(tna.state.tables) == set(v1model.state.tables)
    assert set(tna.state.counters) == set(v1model.state.counters)
    ingress, egress = (set(half.state.tables) for half in tna.halves)
    assert not ingress & egress
    assert ingress and egress


@fuzz(2000, arrival=st.one_of(arrivals, arrivals, arrivals, packet_outs))
def test_both_programs_do_the_same(programs: tuple[Program, TnaProgram], arrival: tuple[int, bytes]) -> None:
    v1model, tna = programs
    port, frame = arrival
    assert tna.process(port, frame) == v1model.process(port, frame)
    assert dict(counts(tna)) == dict(counts(v1model))


def test_both_programs_do_the_same_with_whatever_is_treated_differently(
    programs: tuple[Program, TnaProgram],
) -> None:
    v1model, tna = programs
    for port in (*PORTS, CPU_PORT):
        for frame in [*(checkmate_frames() if port != CPU_PORT else []), *checkmate_last(port, 1)]:
            assert tna.process(port, frame) == v1model.process(port, frame)
    assert dict(counts(tna)) == dict(counts(v1model))
    assert len([count for _, count in counts(tna) if count.packets]) >= 12


def tcp_error(frame: bytes) -> int:
    """Return the error of a TCP checksum modulo 0xFFFF: 0 if it is correct."""
    pseudo = frame[26:34] + struct.pack("!HH", 6, len(frame) - 34)
    return (0xFFFF - ones_sum(pseudo + frame[34:])) % 0xFFFF


@settings(max_examples=500)
@given(connected)
@example(Frame(options=TAG + struct.pack("!IIHBB", 0, 0, 3, 1, 7), payload=b"\xff\xff" * 7))
def test_a_copys_checksums_are_those_of_full_recomputation(
    programs: tuple[Program, TnaProgram], frame: Frame
) -> None:
    """A wrong checksum stays wrong by the same error."""
    original = frame.encode()
    shadow, training = programs[1].process(1, original)
    assert training.frame == original
    assert ones_sum(shadow.frame[14:34]) == 0xFFFF
    assert tcp_error(shadow.frame) == tcp_error(original)
    assert frame.damage or tcp_error(shadow.frame) == 0
    assert int.from_bytes(shadow.frame[16:18], "big") == len(shadow.frame) - 14


def test_traces_have_both_halves(programs: tuple[Program, TnaProgram]) -> None:
    """As `--trace` prints them."""
    _, tna = programs
    trace = Trace(tna.notations)
    tna.process(1, bytes(60), trace)
    text = trace.text()
    assert "action flood()" in text and "egress.p4" in text, text
