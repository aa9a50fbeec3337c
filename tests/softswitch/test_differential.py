"""The embedded target against BMv2: the same program, entries and frames have the same result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from softswitch.program.state import State
from tests.softswitch.support import bmv2_target
from tests.softswitch.support.bmv2_target import Bmv2
from tests.softswitch.support.scenarios import CPU_PORT, SCENARIOS, FrameScenario, files

REASON = bmv2_target.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")

# Raw sockets send at least an Ethernet header, and the kernel removes VLAN tags from frames.
SHORTEST = 14
VLAN_TYPES = (0x8100, 0x88A8)
HEADERS = 90
BATCHES = 300
# BMv2's receive ring holds about 30 frames; a few more follow each batch.
BATCH = 20


class TargetPair:
    """Both targets with the same state, and their number of batches."""

    def __init__(self, scenario: FrameScenario, bmv2: Bmv2) -> None:
        self.scenario = scenario
        self.bmv2 = bmv2
        self.batches = 0
        self.ports = sorted({*scenario.ports, *scenario.sources})

    def send(self, port: int, frames: list[bytes]) -> tuple[dict[int, list[bytes]], dict[int, list[bytes]]]:
        """Return each target's outputs by port, sorted, for frames into one port.

        Frames that reach every port follow them, to detect when BMv2 is done.
        """
        ours: dict[int, list[bytes]] = {p: [] for p in self.ports}
        last: dict[int, list[bytes]] = {}
        for frame in frames:
            self._send(port, frame, ours)
        self.batches += 1
        for frame in self.scenario.last(port, self.batches):
            self._send(port, frame, ours, last)
        theirs = self.bmv2.receive(last)
        return _sorted(ours), _sorted({p: theirs[p] for p in self.ports})

    def _send(self, port: int, frame: bytes, *sent: dict[int, list[bytes]]) -> None:
        """Send a frame to both; add our outputs at the scenario's ports to `sent`."""
        for output in self.scenario.program.process(port, frame):
            if output.port in self.ports:
                for frames in sent:
                    frames.setdefault(output.port, []).append(output.frame)
        self.bmv2.send(port, frame)


def _sorted(frames: dict[int, list[bytes]]) -> dict[int, list[bytes]]:
    return {port: sorted(sent) for port, sent in frames.items()}


@pytest.fixture(scope="module", params=sorted(SCENARIOS))
def pair(request: pytest.FixtureRequest) -> Iterator[TargetPair]:
    """Yield both targets, for each program."""
    scenario = SCENARIOS[request.param]()
    config, p4info = files(scenario.base)
    with bmv2_target.running(scenario.name, config, p4info, scenario.ports) as bmv2:
        bmv2.install(scenario.program.state)
        yield TargetPair(scenario, bmv2)


def mutated(draw: st.DrawFn, frame: bytes) -> bytes:
    """Return a frame unchanged, with changed bytes or bits in its headers, or truncated."""
    changed = bytearray(frame)
    top = min(len(frame), HEADERS) - 1
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2, 5)))):
        place = draw(st.integers(0, top))
        if draw(st.booleans()):
            changed[place] = draw(st.sampled_from((0, 1, 0x08, 0x45, 0x7F, 0x80, 0xC4, 0xFD, 0xFF)))
        else:
            changed[place] ^= 1 << draw(st.integers(0, 7))
    if draw(st.sampled_from((False, False, False, True))):
        del changed[draw(st.integers(SHORTEST, len(changed))) :]
    if int.from_bytes(changed[12:14], "big") in VLAN_TYPES:
        changed[12:14] = b"\x08\x00"
    return bytes(changed)


@settings(max_examples=BATCHES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_same_frames_leave(pair: TargetPair, data: st.DataObject) -> None:
    """For any input, both send the same frames from the same ports."""
    port = data.draw(st.sampled_from(pair.scenario.sources), label="port")
    frames = data.draw(batch(pair.scenario, port), label="frames")
    ours, theirs = pair.send(port, frames)
    assert ours == theirs


@st.composite
def batch(draw: st.DrawFn, scenario: FrameScenario, port: int) -> list[bytes]:
    """Return frames for one port, most of them changed; those for the CPU port have a header."""
    frames = []
    for frame in draw(st.lists(st.sampled_from(scenario.frames), min_size=10, max_size=BATCH)):
        changed = mutated(draw, frame)
        if port == CPU_PORT:
            out = draw(st.sampled_from((*scenario.ports, 0, CPU_PORT, 511)))
            changed = out.to_bytes(2, "big") + changed
        frames.append(changed)
    return frames


def test_same_counts(pair: TargetPair) -> None:
    """Afterwards, all counters are equal."""
    state = pair.scenario.program.state
    for port in pair.scenario.sources:
        if port != CPU_PORT:
            for start in range(0, len(pair.scenario.frames), BATCH):
                ours, theirs = pair.send(port, pair.scenario.frames[start : start + BATCH])
                assert ours == theirs
    assert _counts(pair, state) == pair.bmv2.counts(state)


def _counts(pair: TargetPair, state: State) -> dict[tuple[str, object], tuple[int, int]]:
    found: dict[tuple[str, object], tuple[int, int]] = {}
    p4info = pair.scenario.program.p4info
    for counter in p4info.counters:
        for index, cell in enumerate(state.counters[counter.preamble.id]):
            found[counter.preamble.name, index] = (cell.packets, cell.bytes)
    for direct in p4info.direct_counters:
        table = state.tables[direct.direct_table_id]
        for key, entry in table.entries.items():
            found[table.name, key] = (entry.count.packets, entry.count.bytes)
    return found
