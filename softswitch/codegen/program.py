"""A compiled P4 program, ready to run: loaded from p4c's output, checked, and translated to Python once."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from finsy.proto import p4i

from softswitch.codegen import vocabulary
from softswitch.codegen.emitter import ProgramPlan
from softswitch.codegen.functions import Output, generate
from softswitch.codegen.linking import link
from softswitch.codegen.primitives import check_actions
from softswitch.program import bmv2
from softswitch.program.bmv2 import UnsupportedProgramError
from softswitch.program.meters import Clock
from softswitch.program.trace import Notations, Trace, program_notations

__all__ = ["Output", "Program", "UnsupportedProgramError", "load"]

Process = Callable[[int, bytes, Trace | None], list[Output]]


class Program:
    """One loaded program: its state, and its processing of packets.

    One thread at a time calls `process`, and a lock of the caller excludes writes to `state` meanwhile.
    `source` is the generated Python, for inspection.
    """

    def __init__(self, p4info: p4i.P4Info, plan: ProgramPlan) -> None:
        self.p4info = p4info
        self.state = plan.links.state
        """Tables, counters, meters, registers and groups."""
        self._plan = plan
        self.source, self._plain = _compile(plan, traced=False)
        self._traced: Process | None = None

    @cached_property
    def notations(self) -> Notations:
        """Notation of its keys and parameters in traces."""
        return program_notations(self._plan.config)

    def process(self, port: int, frame: bytes, trace: Trace | None = None) -> list[Output]:
        """Return the outputs for a frame received at `port`, in the order of admission.

        Copies with an instance other than 0 are first, in the order of their group.
        """
        if trace is None:
            return self._plain(port, frame, None)
        if self._traced is None:
            self._traced = _compile(self._plan, traced=True)[1]
        return self._traced(port, frame, trace)


def load(config_json: bytes, p4info: p4i.P4Info, clock: Clock = time.monotonic_ns) -> Program:
    """Load a program from p4c's BMv2 JSON and P4Info; `clock` is the time of its meters.

    Raises:
        UnsupportedProgramError: With all unsupported features and their source lines.
        ValueError: JSON and P4Info do not belong together, or the JSON is invalid.
    """
    config = bmv2.read(config_json)
    with bmv2.consistent():
        links = link(config, p4info, clock)
        check_actions(config)
        plan = ProgramPlan.from_config(config, links)
        if any(not header.metadata and header.name not in plan.layouts for header in config.headers.values()):
            raise UnsupportedProgramError(config.problems)
        return Program(p4info, plan)


def _compile(plan: ProgramPlan, traced: bool) -> tuple[str, Process]:
    source, environment = generate(plan, traced)
    if plan.config.problems:
        raise UnsupportedProgramError(plan.config.problems)
    namespace: dict[str, Any] = dict(environment)
    tree = ast.parse(source)
    vocabulary.check(tree)
    exec(compile(tree, "<program>", "exec"), namespace)
    process: Process = namespace["process"]
    return source, process
