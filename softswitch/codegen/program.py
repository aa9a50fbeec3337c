"""A compiled P4 program, ready to run: loaded from what p4c wrote, checked, and translated to Python once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from finsy.proto import p4i

from softswitch.codegen.codegen import Output, generate
from softswitch.codegen.emitter import ProgramPlan
from softswitch.codegen.linking import UnsupportedProgramError, link
from softswitch.codegen.primitives import DROP_PORT, check_actions
from softswitch.program import bmv2
from softswitch.program.notation import Notations
from softswitch.program.state import State
from softswitch.program.trace import Trace

__all__ = ["Output", "Program", "UnsupportedProgramError", "load"]

Process = Callable[[int, bytes, Trace | None], list[Output]]


class Program:
    """One loaded program: its state, and what it does to a packet.

    `process` is called by one thread at a time, and writes to `state` keep out of its way (a lock outside).
    `source` is the generated Python, to read. `cpu_port` is the port that stands for the controller, for
    whoever owns the ports; programs see it as a port like any other.
    """

    drop_port = DROP_PORT

    def __init__(self, p4info: p4i.P4Info, plan: ProgramPlan) -> None:
        self.p4info = p4info
        self.cpu_port: int | None = None
        self._plan = plan
        self.source, self._plain = _compile(plan, traced=False)
        self._traced: Process | None = None

    @property
    def state(self) -> State:
        """Tables, counters, registers and groups."""
        return self._plan.links.state

    @cached_property
    def notations(self) -> Notations:
        """How traces write the values of its keys and parameters."""
        return Notations(self._plan.config)

    def process(self, port: int, frame: bytes, trace: Trace | None = None) -> list[Output]:
        """What leaves egress for a frame that came in by `port`, in the order of admission.

        Copies whose instance isn't 0 come first, in the order of their group.
        """
        if trace is None:
            return self._plain(port, frame, None)
        if self._traced is None:
            self._traced = _compile(self._plan, traced=True)[1]
        return self._traced(port, frame, trace)


def load(config_json: bytes, p4info: p4i.P4Info) -> Program:
    """Load a program from p4c's BMv2 JSON and P4Info.

    `UnsupportedProgramError` names everything that the embedded target doesn't support, with source lines;
    `ValueError` says why the two don't belong together, or why the JSON is none.
    """
    config = bmv2.read(config_json)
    links = link(config, p4info)
    check_actions(config)
    plan = ProgramPlan.of(config, links)
    if any(not header.metadata and header.name not in plan.layouts for header in config.headers.values()):
        raise UnsupportedProgramError(config.problems)
    return Program(p4info, plan)


def _compile(plan: ProgramPlan, traced: bool) -> tuple[str, Process]:
    source, environment = generate(plan, traced)
    if plan.config.problems:
        raise UnsupportedProgramError(plan.config.problems)
    namespace: dict[str, Any] = dict(environment)
    exec(compile(source, f"<{plan.config.raw.get('program', 'program')}>", "exec"), namespace)
    process: Process = namespace["process"]
    return source, process
