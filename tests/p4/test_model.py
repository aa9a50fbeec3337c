"""Tofino's model and the embedded target: the same entries and frames have the same result.

The recorded run is of the model. With `CHECKMATE_TOFINO=switch.yaml`, a file as for `make ptf`, a running
model or chip gets as many frames as `CHECKMATE_FRAMES` specifies; `CHECKMATE_TRACE=FILE` records the first.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptf_tests.stage.config import read_config
from softswitch.codegen.program import Program
from tests.p4.test_tna import tna_program
from tests.softswitch.support.scenarios import CPU_PORT, checkmate_last
from tests.softswitch.support.traffic import Traffic, guarded, verdict
from tests.support.fuzz import positive
from tests.support.p4 import chip
from tests.support.p4.traces import Trace, read_trace

RECORDED = Path(__file__).parents[1] / "data" / "tofino_model.json.gz"
STANDING = os.environ.get("CHECKMATE_TOFINO")
FRAMES = positive("CHECKMATE_FRAMES", 20_000)
TRACED, TRACED_LONGEST = 1500, 400
BATCH = 20
PORTS = (1, 2, 3)
Output = dict[int, list[bytes]]


def unlimited() -> Program:
    """Return a program with all features, whose meters pass everything: a chip's have a clock."""
    program = guarded(0).program
    for cells in program.state.meters.values():
        cells[:] = [None] * len(cells)
    for _, entry in program.state.all_entries():
        entry.meter = None
    return program


def output(program: Program, port: int, frames: list[bytes]) -> tuple[Output, Counter[str]]:
    """Return what leaves each port, and the numbers of verdicts; a chip drops what ends inside a header."""
    sent: Output = {}
    verdicts: Counter[str] = Counter()
    for frame in frames:
        copies = [] if chip.ends_in_header(frame) else program.process(port, frame)
        verdicts[verdict(copies)] += 1
        for copy in copies:
            if copy.port in (*PORTS, CPU_PORT):
                sent.setdefault(copy.port, []).append(copy.frame)
    return sent, verdicts


def in_any_order(sent: Output) -> Output:
    """Return frames sorted by port, because copies and other frames are in different queues."""
    return {port: sorted(frames) for port, frames in sent.items() if frames}


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return read_trace(RECORDED)


def test_the_recorded_run_has_every_verdict(recorded: Trace) -> None:
    program = recorded.program()
    verdicts: Counter[str] = Counter()
    for port, frames, _ in recorded.batches:
        verdicts.update(output(program, port, frames)[1])
    assert len(verdicts) == 6
    assert verdicts.total() > 1000
    assert {port for port, _, _ in recorded.batches} == set(PORTS)


@pytest.mark.parametrize("halves", [False, True], ids=["v1model", "tna"])
def test_the_embedded_target_does_what_the_model_did(recorded: Trace, halves: bool) -> None:
    program = recorded.program()
    does: Program = tna_program(program) if halves else program
    for number, (port, frames, came) in enumerate(recorded.batches):
        ours, _ = output(does, port, frames)
        assert in_any_order(ours) == in_any_order(came), f"batch {number}"


@pytest.fixture
def standing() -> Iterator[tuple[Program, chip.Chip]]:
    """Yield our program, and a running model with the same entries."""
    if STANDING is None:
        pytest.skip("CHECKMATE_TOFINO names no file that describes a running Tofino or model")
    program = unlimited()
    with chip.running(Path(STANDING), chip.entities(program.state), PORTS) as model:
        yield program, model


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_has_the_same_outcome_on_a_running_model(
    standing: tuple[Program, chip.Chip],
) -> None:
    program, model = standing
    seed = random.getrandbits(32)
    traffic, kinds = Traffic(seed), Counter[str]()
    verdicts: Counter[str] = Counter()
    assert STANDING is not None
    trace = Trace(read_config(Path(STANDING)).target, chip.entities(program.state))
    indexed = ("passed", "losses", "hidden", "plain_acks")
    before = model.counts(indexed)
    for number in range(FRAMES // BATCH):
        port = PORTS[number % len(PORTS)]
        names, drawn = zip(*traffic.frames(BATCH), strict=True)
        kinds.update(names)
        frames = [chip.on_the_wire(frame) for frame in drawn]
        if len(trace.batches) < TRACED // BATCH:
            frames = [frame for frame in frames if len(frame) <= TRACED_LONGEST]
        marks = [chip.on_the_wire(frame) for frame in checkmate_last(port, number)]
        ours, found = output(program, port, frames)
        last, _ = output(program, port, marks)
        came = model.exchange(port, [*frames, *marks], last)
        verdicts.update(found)
        expected = {where: ours.get(where, []) + last.get(where, []) for where in {*ours, *last}}
        assert in_any_order(expected) == in_any_order(came), f"seed {seed}, batch {number}"
        if len(trace.batches) < TRACED // BATCH:
            trace.batches.append((port, [*frames, *marks], came))
    after = model.counts(indexed)
    cells = {
        counter.preamble.name: program.state.counters[counter.preamble.id]
        for counter in program.p4info.counters
    }
    grown = {
        name: [now.packets - then.packets for now, then in zip(after[name], before[name], strict=True)]
        for name in indexed
    }
    print(f"seed {seed}: {kinds.total()} frames", dict(kinds), dict(verdicts), grown, sep="\n")
    assert grown == {name: [cell.packets for cell in cells[name]] for name in indexed}
    assert len(kinds) == 11
    assert len(verdicts) == 6
    if "CHECKMATE_TRACE" in os.environ:
        trace.write(Path(os.environ["CHECKMATE_TRACE"]))
