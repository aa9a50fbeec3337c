"""The embedded target against BMv2: the same program, entries and frames have the same result."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softswitch.program.meters import SECOND, MeterCell, MeterRates
from tests.softswitch.support.bmv2_target import SHORTEST, carried, missing
from tests.softswitch.support.scenarios import CPU_PORT, SCENARIOS, STUB_IP, FrameScenario, segment
from tests.softswitch.support.target_pair import PortOutputs, TargetPair, both
from tests.softswitch.support.traffic import OTHER_PORT, Traffic, guarded, verdict
from tests.support.fuzz import positive

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")

HEADERS = 90
BATCHES = 300
# BMv2's receive ring holds about 30 frames; a few more follow each batch.
BATCH = 20
FRAMES = positive("CHECKMATE_FRAMES", 4000)
DIFFERENCES = 20
"""The comparison ends after this number of batches that differ."""


def in_any_order(outputs: PortOutputs) -> PortOutputs:
    """Return frames sorted by port: the order of one frame's copies at one port is each target's own."""
    return {port: sorted(frames) for port, frames in outputs.items()}


@pytest.fixture(scope="module", params=sorted(SCENARIOS))
def pair(request: pytest.FixtureRequest) -> Iterator[TargetPair]:
    """Yield both targets, for each program."""
    with both(SCENARIOS[request.param]()) as targets:
        yield targets


def mutated(draw: st.DrawFn, frame: bytes) -> bytes:
    """Return a frame unchanged, with changed bytes or bits in its headers, or truncated."""
    frame_bytes = bytearray(frame)
    top = min(len(frame), HEADERS) - 1
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2, 5)))):
        place = draw(st.integers(0, top))
        if draw(st.booleans()):
            frame_bytes[place] = draw(st.sampled_from((0, 1, 0x08, 0x45, 0x7F, 0x80, 0xC4, 0xFD, 0xFF)))
        else:
            frame_bytes[place] ^= 1 << draw(st.integers(0, 7))
    if draw(st.sampled_from((False, False, False, True))):
        del frame_bytes[draw(st.integers(SHORTEST, len(frame_bytes))) :]
    return carried(bytes(frame_bytes))


@settings(max_examples=BATCHES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_same_frames_leave(pair: TargetPair, data: st.DataObject) -> None:
    """For any input, both send the same frames from the same ports."""
    port = data.draw(st.sampled_from(pair.scenario.sources), label="port")
    frames = data.draw(batch(pair.scenario, port), label="frames")
    outputs, bmv2_outputs = pair.send(port, frames)
    assert in_any_order(outputs) == in_any_order(bmv2_outputs)


@st.composite
def batch(draw: st.DrawFn, scenario: FrameScenario, port: int) -> list[bytes]:
    """Return frames for one port, most of them changed; those for the CPU port have a header."""
    frames = []
    for frame in draw(st.lists(st.sampled_from(scenario.frames), min_size=10, max_size=BATCH)):
        mutant = mutated(draw, frame)
        if port == CPU_PORT:
            out = draw(st.sampled_from((*scenario.ports, 0, CPU_PORT, 511)))
            mutant = out.to_bytes(2, "big") + mutant
        frames.append(mutant)
    return frames


def test_same_counts(pair: TargetPair) -> None:
    """Afterwards, all counters are equal."""
    for port in pair.scenario.sources:
        if port != CPU_PORT:
            for start in range(0, len(pair.scenario.frames), BATCH):
                outputs, bmv2_outputs = pair.send(port, pair.scenario.frames[start : start + BATCH])
                assert in_any_order(outputs) == in_any_order(bmv2_outputs)
    assert pair.counts() == pair.bmv2.counts(pair.state)


@pytest.mark.timeout(120 + FRAMES // 500)
def test_random_traffic_has_the_same_outcome() -> None:
    """Ports, bytes, order at each port, and all counters are equal; the program has no registers."""
    seed = random.getrandbits(32)
    traffic, start = Traffic(seed), time.monotonic()
    kinds: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    differences: list[str] = []
    with both(guarded(FRAMES // 40)) as pair:
        while kinds.total() < FRAMES and len(differences) < DIFFERENCES:
            port = traffic.port()
            names, frames = zip(*traffic.frames(BATCH), strict=True)
            batch_frames = [traffic.packet_out(frame) if port == CPU_PORT else frame for frame in frames]
            outputs, bmv2_outputs = pair.send(port, batch_frames)
            kinds.update(names if port != CPU_PORT else ["from the controller"] * BATCH)
            verdicts.update(map(verdict, pair.outputs))
            for out in (out for out in pair.ports if outputs[out] != bmv2_outputs[out]):
                missing_there = [frame.hex() for frame in outputs[out] if frame not in bmv2_outputs[out]]
                missing_here = [frame.hex() for frame in bmv2_outputs[out] if frame not in outputs[out]]
                differences.append(
                    f"from port {port} to {out}: only ours {missing_there}, only BMv2's {missing_here}"
                )
        counts = pair.counts()
        indexed = {f"{key[0]}[{key[1]}]": n for key, (n, _) in counts.items() if isinstance(key[1], int)}
        print(f"seed {seed}: {kinds.total()} frames in {time.monotonic() - start:.0f} s")
        print(dict(kinds), dict(verdicts), indexed, sep="\n")
        assert not differences, f"seed {seed}: {len(differences)} differences: {differences}"
        assert counts == pair.bmv2.counts(pair.state)
        assert not pair.state.registers
    assert len(kinds) == 12
    assert len(verdicts) == 6
    assert all(indexed.values())


@pytest.mark.parametrize(("rate", "burst"), [(200, 40), (800, 300)])
def test_meters_pass_as_much(rate: int, burst: int) -> None:
    """Both pass the same part of a flood, but for what the rate allows in the delay from sending to metering.

    A bucket that is empty after the burst passes what its clock adds. Our clock has the time at which a
    batch is sent. BMv2 meters the batch up to `delay` later, and adds for whole microseconds only.
    """
    clock = [0]
    scenario = guarded(CPU_PORT, lambda: clock[0])
    (cells,) = scenario.program.state.meters.values()
    cells[OTHER_PORT] = MeterCell(MeterRates(rate // 4, burst // 4, rate, burst))
    flood = [segment(source="10.3.0.1", destination=STUB_IP, flags="S", tos=0)] * BATCH
    pass_counts, frame_count, delay = [0, 0], 0, 0
    with both(scenario) as pair:
        start = time.monotonic_ns()
        while (began := time.monotonic_ns()) < start + SECOND:
            clock[0] = began
            for target, outputs in enumerate(pair.send(OTHER_PORT, flood)):
                pass_counts[target] += len(outputs[CPU_PORT])
            frame_count += BATCH
            delay = max(delay, time.monotonic_ns() - began)
    assert abs(pass_counts[0] - pass_counts[1]) <= 1 + rate * (delay / SECOND + frame_count * 1e-6), (
        pass_counts,
        frame_count,
        delay,
    )
    assert burst < min(pass_counts) < frame_count
