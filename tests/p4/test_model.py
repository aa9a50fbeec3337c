"""Tofino's models and the embedded target: the same entries and frames have the same result.

The recorded runs are of the models. With `CHECKMATE_TOFINO=switch.yaml`, a file as for `make ptf`, a running
model or chip gets as many frames as `CHECKMATE_FRAMES` specifies; `CHECKMATE_TRACE=FILE` records the first.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptf_tests.stage.config import read_config
from softswitch.codegen.program import Program
from tests.p4.test_tna import tna_program
from tests.softswitch.support.scenarios import CPU_PORT, checkmate_last
from tests.softswitch.support.traffic import Traffic, guarded, verdict
from tests.support.fuzz import positive
from tests.support.p4 import chip
from tests.support.p4.frames import Frame, connected, other_frames, tagged
from tests.support.p4.traces import Trace, read_trace

DATA = Path(__file__).parents[1] / "data"
STANDING = os.environ.get("CHECKMATE_TOFINO")
FRAMES = positive("CHECKMATE_FRAMES", 20_000)
TRACED, TRACED_LONGEST = 1500, 400
BATCH = 20
PORTS = (1, 2, 3)
INDEXED = ("passed", "losses", "hidden", "plain_acks")
Output = dict[int, list[bytes]]
drawn_frames = st.one_of(connected, tagged, other_frames)


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
    frames_by_port: Output = {}
    verdicts: Counter[str] = Counter()
    for frame in frames:
        copies = [] if chip.ends_in_header(frame) else program.process(port, frame)
        verdicts[verdict(copies)] += 1
        for copy in copies:
            if copy.port in (*PORTS, CPU_PORT):
                frames_by_port.setdefault(copy.port, []).append(copy.frame)
    return frames_by_port, verdicts


def in_any_order(frames_by_port: Output) -> Output:
    """Return frames sorted by port, because copies and other frames are in different queues."""
    return {port: sorted(frames) for port, frames in frames_by_port.items() if frames}


@pytest.fixture(scope="module", params=["tofino", "tofino2"])
def recorded(request: pytest.FixtureRequest) -> Trace:
    trace = read_trace(DATA / f"{request.param}_model.json.gz")
    assert trace.on == request.param
    return trace


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
        outputs, _ = output(does, port, frames)
        assert in_any_order(outputs) == in_any_order(came), f"batch {number}"


class Compared:
    """A running model and our program with the same entries, and frames that both get."""

    def __init__(self, program: Program, model: chip.Chip, on: str) -> None:
        self.trace = Trace(on, chip.entities(program.state))
        self.verdicts: Counter[str] = Counter()
        self.batches = self.frames = 0
        self._program, self._model = program, model
        self._before = model.counts(INDEXED)

    def send(self, port: int, frames: list[bytes]) -> None:
        """Check that frames, as they are on the wire, leave the same ports in the same form."""
        frames = [chip.on_the_wire(frame) for frame in frames]
        if traced := len(self.trace.batches) < TRACED // BATCH:
            frames = [frame for frame in frames if len(frame) <= TRACED_LONGEST]
        self.batches += 1
        self.frames += len(frames)
        marks = [chip.on_the_wire(frame) for frame in checkmate_last(port, self.batches)]
        outputs, verdicts = output(self._program, port, frames)
        last, _ = output(self._program, port, marks)
        came = self._model.exchange(port, [*frames, *marks], last)
        self.verdicts.update(verdicts)
        expected = {where: outputs.get(where, []) + last.get(where, []) for where in {*outputs, *last}}
        assert in_any_order(expected) == in_any_order(came), f"batch {self.batches}"
        if traced:
            self.trace.batches.append((port, [*frames, *marks], came))

    def check_counters(self) -> None:
        """Check that counters with an index have grown by the same numbers of packets."""
        after, state = self._model.counts(INDEXED), self._program.state
        ids = {info.preamble.name: info.preamble.id for info in self._program.p4info.counters}
        grown = {
            name: [
                now.packets - then.packets for now, then in zip(after[name], self._before[name], strict=True)
            ]
            for name in INDEXED
        }
        print(f"{self.frames} frames", dict(self.verdicts), grown, sep="\n")
        assert grown == {name: [cell.packets for cell in state.counters[ids[name]]] for name in INDEXED}


@pytest.fixture
def compared() -> Iterator[Compared]:
    """Yield our program, and a running model with the same entries."""
    if STANDING is None:
        pytest.skip("CHECKMATE_TOFINO names no file that describes a running Tofino or model")
    program, file = unlimited(), Path(STANDING)
    with chip.running(file, chip.entities(program.state), PORTS) as model:
        yield Compared(program, model, read_config(file).target)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_traffic_has_the_same_outcome_on_a_running_model(compared: Compared) -> None:
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    traffic, kinds = Traffic(seed), Counter[str]()
    for number in range(FRAMES // BATCH):
        names, frames = zip(*traffic.frames(BATCH), strict=True)
        kinds.update(names)
        compared.send(PORTS[number % len(PORTS)], list(frames))
    compared.check_counters()
    assert len(kinds) == 11
    assert len(compared.verdicts) == 6
    if "CHECKMATE_TRACE" in os.environ:
        compared.trace.write(Path(os.environ["CHECKMATE_TRACE"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hypothesis_finds_no_difference_on_a_running_model(compared: Compared) -> None:
    @settings(max_examples=100, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(PORTS), st.lists(drawn_frames, min_size=1, max_size=2 * BATCH))
    def same(port: int, frames: list[Frame]) -> None:
        compared.send(port, [frame.encode() for frame in frames])

    while compared.frames < FRAMES:
        same()
    compared.check_counters()
    assert len(compared.verdicts) == 6
