"""The Tofino program on the embedded target, as a switch process: `python -m ptf_tests.stage.tna`.

The unchanged parsers, controls and deparsers of checkmate_tna.p4 run as two v1model programs, ingress and
egress (p4src/tna_on_v1model). Intrinsic metadata are prefixes of the packet, and the embedded target's
replication engine is between the programs. Only the residual checksums are computed by other means.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cached_property

from finsy import P4Schema
from finsy.proto import p4i
from google.protobuf import text_format

import softswitch.p4runtime.pipeline
import softswitch.process
from controlplane.p4runtime.codec import Codec
from p4src import artifacts
from p4src.compile import HALVES
from softswitch.codegen.program import Output, Program, load
from softswitch.program.state import CounterCell, State
from softswitch.program.trace import Notations, Trace

_BEFORE_INGRESS = 16
"""Bytes of intrinsic and port metadata before a frame."""
_BEFORE_EGRESS = 27
_BRIDGED = 5
_FILES = {"json": "json", "p4info": "p4info.txtpb"}


class TnaProgram(Program):
    """Both halves as one program, with the interface of `softswitch.codegen.program.Program`."""

    def __init__(self, p4info: p4i.P4Info, ingress: Program, egress: Program) -> None:
        self.p4info = p4info
        self.halves = ingress, egress
        # Tables, counters and meters of both halves; the groups of the first, which replicates.
        self.state = State(
            tables=ingress.state.tables | egress.state.tables,
            counters=ingress.state.counters | egress.state.counters,
            meters=ingress.state.meters | egress.state.meters,
            groups=ingress.state.groups,
        )

    @cached_property
    def notations(self) -> Notations:
        """Notation of both halves' keys and parameters in traces."""
        ingress, egress = self.halves
        return ingress.notations | egress.notations

    def process(self, port: int, frame: bytes, trace: Trace | None = None) -> list[Output]:
        """Return the outputs for a frame received at `port`, in the order of admission."""
        ingress, egress = self.halves
        outputs = []
        intrinsic = port.to_bytes(2, "big").ljust(_BEFORE_INGRESS, b"\0")
        for copy in _run(ingress, port, intrinsic, frame, trace):
            bypass, rest = copy.frame[0], copy.frame[1:]
            if bypass:
                outputs.append(copy._replace(frame=rest))
                continue
            bridged, rest = rest[:_BRIDGED], rest[_BRIDGED:]
            intrinsic = b"".join((copy.port.to_bytes(2, "big"), bytes(15), copy.instance.to_bytes(2, "big")))
            intrinsic = intrinsic.ljust(_BEFORE_EGRESS, b"\0")
            for out in _run(egress, port, intrinsic + bridged, rest, trace):
                outputs.append(copy._replace(port=out.port, frame=out.frame))
        return outputs


def _run(half: Program, port: int, prefix: bytes, rest: bytes, trace: Trace | None) -> list[Output]:
    """Run a half, without counting the prefix."""
    packets = [(cell, cell.packets) for cell in _cells(half.state)]
    outputs = half.process(port, prefix + rest, trace)
    for cell, before in packets:
        cell.bytes -= len(prefix) * (cell.packets - before)
    return outputs


def _cells(state: State) -> Iterator[CounterCell]:
    for _, entry in state.all_entries():
        yield entry.count
    for cells in state.counters.values():
        yield from cells


def device_config() -> bytes:
    """Return p4c's output of both halves, for `load_halves`."""
    folder = artifacts("tna")
    return json.dumps(
        {
            half: {kind: (folder / f"{half}.{ending}").read_text() for kind, ending in _FILES.items()}
            for half in HALVES
        }
    ).encode()


def codec() -> Codec:
    """Return the codec of v1model's P4Info, whose names and ids the halves have (unlike on Tofino)."""
    p4info = artifacts("bmv2") / "checkmate_v1model.p4info.txtpb"
    return Codec(P4Schema(p4info, device_config()))


def load_halves(config_json: bytes, p4info: p4i.P4Info) -> TnaProgram:
    """Load both halves, in place of `softswitch.codegen.program.load`."""
    config = json.loads(config_json)
    ingress, egress = (
        load(config[half]["json"].encode(), text_format.Parse(config[half]["p4info"], p4i.P4Info()))
        for half in HALVES
    )
    return TnaProgram(p4info, ingress, egress)


if __name__ == "__main__":
    vars(softswitch.p4runtime.pipeline)["load"] = load_halves
    sys.exit(softswitch.process.main())
