"""Emitter of generated Python: variables, fields, expressions.

Code is generated in several rounds. In each, the findings about the program (`ProgramFacts`) allow more to be
omitted: variables that nothing reads, headers that nothing writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from softswitch.codegen.layout import SCRATCH, HeaderLayout, Names, plan
from softswitch.codegen.values import OPERATORS, OperatorError, Value, fit, number, truth, variable
from softswitch.program.bmv2 import Json, ProgramConfig, references
from softswitch.program.meters import Clock, MeterCell
from softswitch.program.state import CounterCell, State, Table

VALID = "$valid$"


@dataclass(slots=True)
class ProgramFacts:
    """Findings of one round about the program.

    Attributes:
        live: Variables that are read.
        modified: Headers whose bytes may differ from the frame's.
        unset: Headers that may become invalid.
        offsets: Start of each header in the frame; `None` if it varies.
    """

    live: set[str] = field(default_factory=set)
    modified: set[str] = field(default_factory=set)
    unset: set[str] = field(default_factory=set)
    offsets: dict[str, set[int | None]] = field(default_factory=dict)


@dataclass(slots=True)
class Links:
    """Run-time objects by their names in the JSON; of actions, their P4Info ids.

    `clock` is the time of meters.
    """

    state: State
    clock: Clock
    tables: dict[str, Table] = field(default_factory=dict)
    counters: dict[str, list[CounterCell]] = field(default_factory=dict)
    meters: dict[str, list[MeterCell | None]] = field(default_factory=dict)
    registers: dict[str, list[int]] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ProgramPlan:
    """The constant part of all rounds: the program, and the layout of its headers in variables."""

    config: ProgramConfig
    links: Links
    names: Names
    layouts: dict[str, HeaderLayout]

    @classmethod
    def from_config(cls, config: ProgramConfig, links: Links) -> ProgramPlan:
        """Lay out a program's headers."""
        names = Names()
        touched: dict[str, set[str]] = {}
        for owner, name in references(config.raw):
            if owner in config.headers:
                touched.setdefault(config.headers[owner].type, set()).add(name)
        layouts = {}
        for header in (h for h in config.headers.values() if not h.metadata):
            if header.bits % 8:
                config.problem(f"header {header.name} is {header.bits} bits wide, not whole bytes")
                continue
            layouts[header.name] = plan(header, touched.get(header.type, set()), names)
        return cls(config, links, names, layouts)


class Emitter:
    """One round of generation: lines, their variables, and their run-time objects."""

    def __init__(self, program_plan: ProgramPlan, facts: ProgramFacts | None, traced: bool) -> None:
        self.plan = program_plan
        self.config = program_plan.config
        self.links = program_plan.links
        self.facts = facts
        self.findings = ProgramFacts()
        self.traced = traced
        self.lines: list[str] = []
        self.depth = 0
        self.variables: dict[str, str] = {}
        self.environment: dict[str, Any] = {}
        self.arguments: list[Value] = []
        self._marked: list[set[str]] = [set()]

    # Lines

    def line(self, text: str) -> None:
        """Add a line at the current depth."""
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def block(self, text: str, optional: bool = False) -> Iterator[None]:
        """Add a line that opens a block; an empty block becomes `pass`, or nothing if it is optional."""
        self.line(text)
        self.depth += 1
        self._marked.append(set(self._marked[-1]))
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            if optional:
                self.lines.pop()
            else:
                self.line("pass")
        self._marked.pop()
        self.depth -= 1

    def trace(self, event: str, **sources: str) -> None:
        """Add an event to the trace, given the source of its fields; only in the traced variant."""
        if self.traced:
            fields = "".join(f", {name}={code}" for name, code in sources.items())
            self.line(f"trace.add({self.text(event)}{fields})")

    def bind(self, kind: str, value: Any, *words: str) -> str:
        """Make a run-time object available to the code; return its identifier there.

        `kind` and `words` tell it apart from all others.
        """
        name = self.plan.names.identifier(kind, *words)
        self.environment[name] = value
        return name

    def text(self, *texts: str) -> str:
        """Return the identifier of a text, or of a tuple of texts."""
        return self.bind("text", texts[0] if len(texts) == 1 else texts, *texts)

    # Variables

    def declare(self, name: str, zero: str = "0") -> str:
        """Declare a variable with the packet's lifetime, and its initial value; return its name."""
        self.variables[name] = zero
        return name

    def live(self, name: str) -> bool:
        """Return whether the variable is read, as far as is known."""
        return self.facts is None or name in self.facts.live

    def assign(self, name: str, code: str, zero: str = "0") -> None:
        """Assign to a variable, unless it is never read."""
        self.declare(name, zero)
        if self.live(name):
            self.line(f"{name} = {code}")

    def flag(self, header: str, kind: str) -> str:
        """Return a header's variable `valid`, `dirty` (differs from the frame) or `at` (where it starts)."""
        return self.declare(self.plan.names.identifier(kind, self.config.headers[header].name))

    def mark_written(self, header: str) -> None:
        """Note that a header's bytes are no longer the frame's."""
        self.findings.modified.add(header)
        self.raise_flag(self.flag(header, "dirty"))
        self.mark_changed(header)

    def is_written(self, header: str) -> bool:
        """Return whether a header's bytes may differ from the frame's."""
        return self.facts is None or header in self.facts.modified

    def original(self, header: str) -> str:
        """Return the source of a header's bytes in the frame; empty if it is never extracted."""
        starts = {None} if self.facts is None else self.facts.offsets.get(header, set())
        if not starts:
            return ""
        size, at = self.plan.layouts[header].size, self.flag(header, "at")
        offset = next(iter(starts)) if len(starts) == 1 else None
        return f"frame[{at}:{at} + {size}]" if offset is None else f"frame[{offset}:{offset + size}]"

    def mark_changed(self, header: str) -> None:
        """Note that the deparser's output for a header may differ from the frame."""
        if header in self.config.deparser["order"]:
            self.raise_flag("changed")

    def mark_clean(self, header: str) -> None:
        """Note that a header was read from the frame again."""
        dirty = self.flag(header, "dirty")
        self.assign(dirty, "0")
        for marked in self._marked:
            marked.discard(dirty)

    def raise_flag(self, name: str) -> None:
        """Set a variable to 1, unless earlier code on this path has done so."""
        if name not in self._marked[-1]:
            self.assign(name, "1")
            self._marked[-1].add(name)

    def function(self, text: str) -> AbstractContextManager[None]:
        """Begin a function, with its own lines and paths."""
        self.lines = []
        self._marked = [set()]
        return self.block(text)

    # Fields

    def layout(self, header: str) -> HeaderLayout:
        """Return a header's layout, and declare its variables."""
        layout = self.plan.layouts[header]
        for chunk in layout.chunks:
            self.declare(chunk.name, chunk.zero)
        return layout

    def width(self, reference: list[str]) -> int:
        """Return the field's width in bits."""
        return 1 if reference[1] == VALID else self.config.field(reference).width

    def load(self, reference: list[str]) -> Value:
        """Return a field's value."""
        header, name = reference
        if name == VALID:
            return variable(self.flag(header, "valid"), 1)
        if header in self.plan.layouts:
            return self.layout(header).read_field(name)
        f = self.config.field(reference)
        return variable(self.declare(self._metadata(header, name)), f.width, f.signed)

    def store(self, reference: list[str], value: Value) -> None:
        """Set a field, truncated to its width.

        Signed fields get two's complement (P4-16 specification, section 8.5). BMv2 does too, except for
        action parameters and registers of `int<>` types, which it leaves unsigned.
        """
        header, name = reference
        if name == VALID:
            self.config.problem(f"assigning to {header}.{name} is not supported")
            return
        if value.truth:
            value = OPERATORS["b2d"](value)
        f = self.config.field(reference)
        if header not in self.plan.layouts:
            self.assign(self._metadata(header, name), fit(value, f.width, f.signed).code)
            return
        lines = self.layout(header).write_field(name, value)
        if any(self.live(target) for target, _ in lines if target != SCRATCH):
            for target, code in lines:
                if target == SCRATCH or self.live(target):
                    self.line(f"{target} = {code}")
        self.mark_written(header)

    def _metadata(self, header: str, name: str) -> str:
        return self.plan.names.identifier("metadata", header, name)

    # Expressions

    def value(self, item: Json, *at: Json) -> Value:
        """Return the value of a JSON expression or parameter; `at` are the enclosing objects, for errors."""
        kind, operand = item["type"], item["value"]
        if kind not in VALUES:
            self.config.problem(f"operand of type {kind} is not supported", item, *at)
            return number(0)
        value: Value = VALUES[kind](self, operand, (item, *at))
        return value

    def condition(self, item: Json, *at: Json) -> Value:
        """Return a JSON expression as a condition."""
        value = self.value(item, *at)
        return value if value.truth else OPERATORS["d2b"](value)


def _expression(emitter: Emitter, expression: Json, at: tuple[Json, ...]) -> Value:
    if "op" not in expression:
        return emitter.value(expression, *at)
    name = expression["op"]
    if name not in OPERATORS:
        emitter.config.problem(f"operator {name} is not supported", *at)
        return number(0)
    operands = [
        emitter.value(expression[side], *at)
        for side in ("cond", "left", "right")
        if expression.get(side) is not None
    ]
    try:
        return OPERATORS[name](*operands)
    except OperatorError as error:
        emitter.config.problem(f"operator {name}: {error}", *at)
        return number(0)


def parse_hex(text: str) -> int:
    """Return a number in BMv2's notation, with a leading sign."""
    return int(text, 16)


VALUES: dict[str, Any] = {
    "field": lambda emitter, reference, _: emitter.load(reference),
    "hexstr": lambda _emitter, text, _: number(parse_hex(text)),
    "bool": lambda _emitter, value, _: truth("True" if value else "False"),
    "expression": _expression,
    **dict.fromkeys(("local", "runtime_data"), lambda emitter, position, _: emitter.arguments[position]),
}
"""Translation of each kind of operand in the JSON to a value."""
