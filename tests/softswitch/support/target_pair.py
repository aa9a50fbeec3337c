"""The embedded target and BMv2 with the same program and state, frame by frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from softswitch.codegen.program import Output
from softswitch.program.state import State
from tests.softswitch.support import bmv2_target
from tests.softswitch.support.bmv2_target import Bmv2
from tests.softswitch.support.scenarios import FrameScenario, files

PortOutputs = dict[int, list[bytes]]
"""Frames by the port that they leave by, in their order."""


class TargetPair:
    """Both targets with the same state, and their number of batches."""

    def __init__(self, scenario: FrameScenario, bmv2: Bmv2) -> None:
        self.scenario = scenario
        self.bmv2 = bmv2
        self.batches = 0
        self.ports = sorted({*scenario.ports, *scenario.sources})
        self.outputs: list[list[Output]] = []
        """Our outputs of each frame of the last batch."""

    def send(self, port: int, frames: list[bytes]) -> tuple[PortOutputs, PortOutputs]:
        """Return each target's outputs by port, for frames into one port.

        Frames that reach every port follow them, to detect when BMv2 is done. Both work at the same time.
        """
        self.batches += 1
        marks = self.scenario.last(port, self.batches)
        for frame in (*frames, *marks):
            self.bmv2.send(port, frame)
        self.outputs = [self.scenario.program.process(port, frame) for frame in frames]
        last = self._by_port([self.scenario.program.process(port, frame) for frame in marks])
        outputs = self._by_port(self.outputs)
        bmv2_outputs = self.bmv2.receive({p: frames_ for p, frames_ in last.items() if frames_})
        return {p: outputs[p] + last[p] for p in self.ports}, {p: bmv2_outputs[p] for p in self.ports}

    def _by_port(self, outputs: list[list[Output]]) -> PortOutputs:
        frames: PortOutputs = {p: [] for p in self.ports}
        for output in (o for batch in outputs for o in batch if o.port in frames):
            frames[output.port].append(output.frame)
        return frames

    def counts(self) -> dict[tuple[str, object], tuple[int, int]]:
        """Return our packets and bytes, as `Bmv2.counts` returns BMv2's."""
        state, p4info = self.state, self.scenario.program.p4info
        counts: dict[tuple[str, object], tuple[int, int]] = {}
        for counter in p4info.counters:
            for index, cell in enumerate(state.counters[counter.preamble.id]):
                counts[counter.preamble.name, index] = (cell.packets, cell.bytes)
        for direct in p4info.direct_counters:
            table = state.tables[direct.direct_table_id]
            for key, entry in table.entries.items():
                counts[table.name, key] = (entry.count.packets, entry.count.bytes)
        return counts

    @property
    def state(self) -> State:
        """Our state, from which BMv2's was made."""
        return self.scenario.program.state


@contextmanager
def both(scenario: FrameScenario) -> Iterator[TargetPair]:
    """Yield both targets of a scenario; BMv2 ends with the block."""
    config, p4info = files(scenario.base)
    with bmv2_target.running(scenario.name, config, p4info, scenario.ports) as bmv2:
        bmv2.install(scenario.program.state)
        yield TargetPair(scenario, bmv2)
