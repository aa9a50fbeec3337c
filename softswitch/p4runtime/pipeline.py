"""A forwarding pipeline: a loaded program, with the codecs for access over P4Runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from finsy.proto import p4i, p4r

from softswitch.codegen.program import Program, UnsupportedProgramError, load
from softswitch.p4runtime.entities import TableCodec, short_name, table_codecs
from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.p4runtime.packetio import ControllerHeader
from softswitch.program.state import StatusError

T = TypeVar("T")
Undo = list[Callable[[], object]]
"""Functions that undo updates, to be called from the last to the first."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An indexed counter, a meter or a register: P4Info id, name, number of cells.

    Meters also have a unit. Registers also have a width in bits, and hold `bool` (`truth`), signed or
    unsigned values.
    """

    id: int
    name: str
    size: int
    width: int = 0
    truth: bool = False
    signed: bool = False
    unit: int = 0

    def cells(self, index: p4r.Index | None) -> range:
        """Return the cell of an index, or all of them; raise `StatusError` for a wrong index."""
        if index is None:
            return range(self.size)
        if index.index < 0:
            raise invalid(f"{self.name}: index {index.index} is negative")
        if index.index >= self.size:
            raise StatusError("OUT_OF_RANGE", f"{self.name}: index {index.index}; it has {self.size} cells")
        return range(index.index, index.index + 1)


@dataclass(slots=True)
class Pipeline:
    """A program and its config from SetForwardingPipelineConfig."""

    program: Program
    config: p4r.ForwardingPipelineConfig
    tables: dict[int, TableCodec]
    counters: dict[int, ArrayInfo]
    meters: dict[int, ArrayInfo]
    registers: dict[int, ArrayInfo]
    packet_in: ControllerHeader
    packet_out: ControllerHeader
    sums_payload: bool
    """The program sums payloads, so it needs complete checksums."""
    groups: dict[int, p4r.MulticastGroupEntry] = field(default_factory=dict)
    """Multicast groups as written by the controller; the program's own form is in its state."""


def build(config: p4r.ForwardingPipelineConfig) -> Pipeline:
    """Load a config; raise `ValueError` if a part is missing or not supported."""
    if not config.p4_device_config:
        raise ValueError("p4_device_config is empty; it must be p4c's JSON for BMv2")
    if not config.HasField("p4info"):
        raise ValueError("p4info is missing")
    p4info = config.p4info
    try:
        program = load(config.p4_device_config, p4info)
    except UnsupportedProgramError as error:
        raise ValueError("; ".join(error.problems)) from None
    return Pipeline(
        program,
        config,
        table_codecs(p4info, program.state.tables),
        {
            info.preamble.id: ArrayInfo(info.preamble.id, short_name(info.preamble), info.size)
            for info in p4info.counters
        },
        {
            info.preamble.id: ArrayInfo(
                info.preamble.id, short_name(info.preamble), info.size, unit=info.spec.unit
            )
            for info in p4info.meters
        },
        {info.preamble.id: _register(info) for info in p4info.registers},
        ControllerHeader(p4info, "packet_in"),
        ControllerHeader(p4info, "packet_out"),
        _sums_payload(config.p4_device_config),
    )


def _sums_payload(device_config: bytes) -> bool:
    calculations = json.loads(device_config).get("calculations", [])
    return any(part["type"] == "payload" for calculation in calculations for part in calculation["input"])


def _register(info: p4i.Register) -> ArrayInfo:
    bits = info.type_spec.bitstring
    signed = bits.WhichOneof("type_spec") == "int"
    width = bits.int.bitwidth if signed else bits.bit.bitwidth
    truth = info.type_spec.WhichOneof("type_spec") == "bool"
    return ArrayInfo(info.preamble.id, short_name(info.preamble), info.size, width, truth, signed)


def find(things: dict[int, T], number: int, kind: str) -> T:
    """Return a thing of a pipeline by its id; raise `StatusError` NOT_FOUND."""
    if number not in things:
        raise StatusError("NOT_FOUND", f"{kind} {number} does not exist")
    return things[number]


def reconcile(old: Pipeline, new: Pipeline) -> None:
    """Give `new` the forwarding state of `old`; raise `StatusError` if a part has no place there.

    Tables are the same when id, key, and each action in use are the same.
    """
    for number, codec in old.tables.items():
        _take_table(codec, new.tables.get(number))
    old_state, new_state = old.program.state, new.program.state
    for number, cells in old_state.counters.items():
        target = new_state.counters.get(number)
        if target is not None and len(target) >= len(cells):
            for cell, before in zip(target, cells, strict=False):
                cell.set(before.packets, before.bytes)
        elif any(cell.packets or cell.bytes for cell in cells):
            raise invalid(f"counter {old.counters[number].name} has no place in the new pipeline")
    for number, meter in old_state.meters.items():
        if new.meters.get(number) == old.meters[number]:
            new_state.meters[number][:] = meter
        elif any(meter):
            raise invalid(f"meter {old.meters[number].name} has no place in the new pipeline")
    for number, values in old_state.registers.items():
        if new.registers.get(number) == old.registers[number]:
            new_state.registers[number][:] = values
        elif any(values):
            raise invalid(f"register {old.registers[number].name} has no place in the new pipeline")
    new_state.groups.update(old_state.groups)
    new.groups.update(old.groups)


def _take_table(old: TableCodec, new: TableCodec | None) -> None:
    entries = [] if old.info.is_const_table else list(old.table.entries.values())
    default = old.table.default
    if default is old.table.initial_default:
        default = None
    if not entries and default is None:
        return
    if new is None or list(new.info.match_fields) != list(old.info.match_fields):
        raise invalid(f"table {old.name} is not there, or has another key, in the new pipeline")
    if new.meter != old.meter and any(entry.meter for entry in entries):
        raise invalid(f"table {old.name}: its meter has no place in the new pipeline")
    actions = {entry.action for entry in entries} | ({default.action} if default is not None else set())
    for action in actions:
        if new.actions.get(action) != old.actions[action]:
            raise invalid(f"table {old.name}: action {old.actions[action].name} is not the same")
    if default is not None:
        if new.table.const_default:
            raise invalid(f"table {old.name}: the default action is constant in the new pipeline")
        new.table.set_default(default)
    for entry in entries:
        if (entry.match, entry.priority) in new.table.entries:
            continue
        try:
            new.table.insert(entry)
        except StatusError as error:
            raise invalid(str(error)) from None
