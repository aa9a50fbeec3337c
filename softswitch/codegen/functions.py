"""The generated functions: parser, controls, checksums and deparser of a program become two Python functions.

`process(port, frame, trace)` parses, runs ingress and decides on copies. `egress(...)` is called for each
copy with the variables that it reads, so that every copy has its own headers and metadata. It returns the
frame's bytes, or `None` for a drop. If no headers were changed, the bytes object that was received is
returned.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from softswitch.codegen.control import ControlEmitter
from softswitch.codegen.emitter import Emitter, ProgramFacts, ProgramPlan
from softswitch.codegen.hashes import calculation
from softswitch.codegen.parsing import ParserEmitter
from softswitch.codegen.primitives import DROP_PORT
from softswitch.codegen.values import Value, number, truth, variable
from softswitch.program.bmv2 import Json
from softswitch.program.state import GroupReplica

REPLICATION = 5
"""`instance_type` of a multicast copy (BMv2's simple_switch)."""
MAX_ROUNDS = 20
LARGE = 2048
"""Payloads of more bytes are joined without a copy."""


class Output(NamedTuple):
    """An output frame: port, bytes, and instance and group of a multicast copy (0 for unicast)."""

    port: int
    frame: bytes
    instance: int
    group: int


def generate(plan: ProgramPlan, traced: bool) -> tuple[str, dict[str, Any]]:
    """Return the source of `process` and `egress`, and their namespace.

    Generation is repeated until nothing more can be omitted. Unsupported features are noted in the plan's
    config.
    """
    facts: ProgramFacts | None = None
    for _ in range(MAX_ROUNDS):
        emitter = Emitter(plan, facts, traced)
        source = _module(emitter)
        if plan.config.problems:
            return "", {}
        emitter.findings.live = _names([source], ast.Load)
        if emitter.findings == facts:
            break
        facts = emitter.findings
    return source, emitter.environment


EGRESS_HEAD = "def egress(frame, trace, copy_port{}):"
PROCESS_HEAD = "def process(port, frame, trace):"


def _module(emitter: Emitter) -> str:
    """Generate one round: `egress` first, because `process` passes it the variables that it reads."""
    with emitter.function(EGRESS_HEAD.format("")):
        _egress(emitter)
    egress = emitter.lines
    with emitter.function(PROCESS_HEAD):
        _parse_and_ingress(emitter)
    ingress = emitter.lines
    with emitter.function(PROCESS_HEAD):
        _forward(emitter, ())
    variables = {*emitter.variables}
    reads = _names(egress, ast.Load) & (variables | {"size"})
    writes = _names([*ingress, *emitter.lines[1:]], ast.Store) | {"size"}
    parameters = sorted(reads & writes)
    with emitter.function(PROCESS_HEAD):
        _forward(emitter, parameters)
    forward = emitter.lines
    start = _start(emitter, _names([*ingress, *forward[1:]], ast.Load) & variables)
    egress_start = _start(emitter, reads - writes)
    head = EGRESS_HEAD.format("".join(f", {name}" for name in parameters))
    process = [PROCESS_HEAD, "    size = len(frame)", *start, *ingress[1:], *forward[1:]]
    return "\n".join([head, *egress_start, *egress[1:], "", "", *process, ""])


def _names(lines: list[str], use: type[ast.expr_context]) -> set[str]:
    """Return the names that some code reads (`ast.Load`) or sets (`ast.Store`)."""
    tree = ast.parse("\n".join(lines))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, use)}


def _start(emitter: Emitter, names: set[str]) -> list[str]:
    """Return the lines that initialize variables."""
    values: dict[str, list[str]] = {}
    for name in sorted(names):
        values.setdefault(emitter.variables[name], []).append(name)
    return [f"    {' = '.join(names)} = {zero}" for zero, names in values.items()]


# Ingress


def _set(emitter: Emitter, name: str, value: Value) -> None:
    """Set a field of the standard metadata."""
    emitter.store(["standard_metadata", name], value)


def _set_time(emitter: Emitter, name: str) -> None:
    """Set a field to the microseconds since the program was loaded."""
    load_time = time.monotonic_ns()
    now = emitter.bind("microseconds", lambda: (time.monotonic_ns() - load_time) // 1000)
    _set(emitter, name, Value(f"{now}()", 0, None))


def _parse_and_ingress(emitter: Emitter) -> None:
    config = emitter.config
    emitter.trace("packet", port="port", bytes="len(frame)")
    _set(emitter, "ingress_port", Value("port"))
    _set(emitter, "packet_length", variable("size", 32))
    _set_time(emitter, "ingress_global_timestamp")
    ParserEmitter(emitter).emit()
    for checksum in config.raw["checksums"]:
        if checksum.get("verify", True):
            _verify(emitter, checksum)
    ControlEmitter(emitter, config.pipelines["ingress"]).emit()


def _verify(emitter: Emitter, checksum: Json) -> None:
    target = checksum["target"]
    with (
        emitter.block(f"if {emitter.flag(target[0], 'valid')}:"),
        emitter.block(f"if {_holds(emitter, checksum)}:"),
    ):
        if not _generic(emitter, checksum):
            return
        result = calculation(emitter, checksum["calculation"], checksum)
        with emitter.block(f"if ({result.code}) != ({emitter.load(target).code}):"):
            _set(emitter, "checksum_error", number(1))
            emitter.trace("checksum_error", field=emitter.text(".".join(target)))


def _holds(emitter: Emitter, checksum: Json) -> str:
    test = checksum.get("if_cond")
    return (truth("True") if test is None else emitter.condition(test, checksum)).code


def _generic(emitter: Emitter, checksum: Json) -> bool:
    if checksum["type"] != "generic":
        emitter.config.problem(f"checksum type {checksum['type']} is not supported", checksum)
    return bool(checksum["type"] == "generic")


@lru_cache(maxsize=1 << 16)
def copies(replicas: tuple[GroupReplica, ...]) -> list[GroupReplica]:
    """Return a group's copies in admission order: instance 0 last."""
    return sorted(replicas, key=lambda copy: copy.instance == 0)


def _forward(emitter: Emitter, parameters: Iterable[str]) -> None:
    """Emit the code after ingress: multicast, drop or one copy."""
    e = emitter
    call = "".join(f", {name}" for name in parameters)
    group = e.load(["standard_metadata", "mcast_grp"]).code
    spec = e.load(["standard_metadata", "egress_spec"]).code
    output = e.bind("output", Output)
    with e.block(f"if {group}:"):
        _set(e, "instance_type", number(REPLICATION))
        e.line("_outputs = []")
        replicas = f"{e.bind('groups', e.links.state.groups)}.get({group}, ())"
        e.line(f"_copies = {e.bind('copies', copies)}({replicas})")
        e.trace("multicast", group=group, copies="len(_copies)")
        with e.block("for _port, _instance in _copies:"):
            _set(e, "egress_rid", variable("_instance", 16))
            e.trace("copy", port="_port", instance="_instance")
            e.line(f"_frame = egress(frame, trace, _port{call})")
            with e.block("if _frame is not None:"):
                e.line(f"_outputs.append({output}(_port, _frame, _instance, {group}))")
                e.trace("output", port="_port", bytes="len(_frame)", instance="_instance")
        e.line("return _outputs")
    with e.block(f"if {spec} == {DROP_PORT}:"):
        _trace_drop(e, "ingress")
        e.line("return []")
    _set(e, "instance_type", number(0))
    e.line(f"_frame = egress(frame, trace, {spec}{call})")
    with e.block("if _frame is None:"):
        e.line("return []")
    e.trace("output", port=spec, bytes="len(_frame)", instance="0")
    e.line(f"return [{output}({spec}, _frame, 0, 0)]")


def _trace_drop(emitter: Emitter, where: str) -> None:
    reason = f"egress_spec is the drop port at the end of {where}"
    emitter.trace("drop", where=emitter.text(where), reason=emitter.text(reason))


# Egress


def _egress(emitter: Emitter) -> None:
    e = emitter
    _set(e, "egress_port", Value("copy_port", 0, None))
    # simple_switch sets 512, which is 0 in nine bits.
    _set(e, "egress_spec", number(0))
    e.declare("packet_size", "size")
    _set(e, "packet_length", variable("packet_size", 32))
    _set_time(e, "enq_timestamp")
    _set_time(e, "egress_global_timestamp")
    # Queues do not exist here.
    for name in ("enq_qdepth", "deq_timedelta", "deq_qdepth"):
        _set(e, name, number(0))
    ControlEmitter(e, e.config.pipelines["egress"]).emit()
    with e.block(f"if {e.load(['standard_metadata', 'egress_spec']).code} == {DROP_PORT}:"):
        _trace_drop(e, "egress")
        e.line("return None")
    for checksum in e.config.raw["checksums"]:
        if checksum.get("update", True) and _generic(e, checksum):
            with e.block(f"if {_holds(e, checksum)}:"):
                e.store(checksum["target"], calculation(e, checksum["calculation"], checksum))
    _deparse(e)


def _deparse(emitter: Emitter) -> None:
    """Emit the code that joins the valid headers and the payload."""
    e = emitter
    for primitive in e.config.deparser.get("primitives") or ():
        e.config.problem(f"{primitive['op']} in the deparser is not supported", primitive, e.config.deparser)
    with e.block(f"if not {e.declare('changed')}:"):
        e.line("return frame")
    e.line("_parts = []")
    for header in e.config.deparser["order"]:
        _emit_header(e, header)
    at = e.declare("at")
    e.line(f"_parts.append(frame[{at}:] if size < {LARGE} else memoryview(frame)[{at}:])")
    e.line('return b"".join(_parts)')


def _emit_header(e: Emitter, header: str) -> None:
    layout = e.plan.layouts.get(header)
    if layout is None:
        return
    part = e.original(header)
    if e.is_written(header):
        e.layout(header)
        pack = f"{e.bind('pack', layout.packer().pack, header)}({', '.join(c.name for c in layout.chunks)})"
        part = f"{pack} if {e.flag(header, 'dirty')} else {part}" if part else pack
    if part:
        with e.block(f"if {e.flag(header, 'valid')}:"):
            e.line(f"_parts.append({part})")
