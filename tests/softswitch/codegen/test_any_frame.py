"""Any bytes at any port: programs neither fail nor differ from their traced variants."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from softswitch.codegen.program import Program
from softswitch.frames.checksums import complete, locate
from softswitch.program.trace import Trace
from tests.softswitch.support.scenarios import CPU_PORT, SCENARIOS, FrameScenario
from tests.support.fuzz import damaged, fuzz


@pytest.fixture(scope="module", params=sorted(SCENARIOS))
def scenario(request: pytest.FixtureRequest) -> FrameScenario:
    return SCENARIOS[request.param]()


def any_frame(data: st.DataObject, frames: list[bytes]) -> bytes:
    whole: bytes = data.draw(st.sampled_from(frames) | st.binary(max_size=200))
    return damaged(data, whole)


@fuzz(300, data=st.data())
def test_any_frame_has_the_same_outputs_with_a_trace(scenario: FrameScenario, data: st.DataObject) -> None:
    program: Program = scenario.program
    port = data.draw(st.sampled_from([*scenario.sources, CPU_PORT, 0, 511]))
    frame = any_frame(data, scenario.frames)
    trace = Trace(program.notations)
    registers = {number: list(values) for number, values in program.state.registers.items()}
    outputs = program.process(port, frame)
    for number, values in registers.items():
        program.state.registers[number][:] = values
    assert program.process(port, frame, trace) == outputs
    assert trace.text()


FRAMES = [frame for make in SCENARIOS.values() for frame in make().frames]


@fuzz(500, data=st.data())
def test_any_frames_checksum_is_completed_or_left(data: st.DataObject) -> None:
    frame = any_frame(data, FRAMES)
    whole = complete(frame)
    assert (whole is None) == (locate(frame) is None)
    if whole is not None:
        assert len(whole) == len(frame)
        assert complete(whole) == whole
