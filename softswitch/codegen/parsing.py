"""The parser as Python source.

States are nested, so that each has a known position in the frame. If that becomes too long, or if a state can
be reached from itself, they become the branches of a loop instead. A further parser operation is one function
and one line in `OPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct

from softswitch.codegen.emitter import Emitter, parse_hex
from softswitch.codegen.primitives import emit_primitive
from softswitch.codegen.values import OPERATORS, Value, chain, fit, number, paren, truth, variable
from softswitch.program.bmv2 import Json

BYTE = 8
MAX_NESTED_STATES = 128
MAX_NESTING = 24
MAX_STEPS = 4096
"""After this number of states, a parser stops with `ParserTimeout`."""


@dataclass(frozen=True, slots=True)
class ParserPlace:
    """Position of the parser: a known byte, or (`None`) the variable `at`; and the extracted headers."""

    offset: int | None
    extracted: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The source of the byte's number."""
        return "at" if self.offset is None else str(self.offset)

    def plus(self, count: int | str) -> str:
        """Return the source of the number of a later byte, a constant or itself source."""
        if self.offset is None or isinstance(count, str):
            return f"{self.code} + {count}"
        return str(self.offset + count)


class ParserEmitter:
    """Emitter of one parser."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.codes = {name: number(code) for code, name in emitter.config.errors.items()}
        self.order = emitter.config.deparser["order"]
        self.states: dict[str, Json] = {s["name"]: s for s in emitter.config.parser["parse_states"]}
        self.numbers = {name: state_number for state_number, name in enumerate(self.states, 1)}
        self.looped = False

    def emit(self) -> None:
        """Emit the parser; after it, `at` is the payload's first byte."""
        self.emitter.declare("at")
        initial = self.emitter.config.parser["init_state"]
        self.looped = not self._fits(initial)
        if self.looped:
            self._loop(initial)
            return
        with self.emitter.block("while True:"):
            self._state(initial, ParserPlace(0))
            self.emitter.line("break")

    def _fits(self, initial: str) -> bool:
        """Return whether the states can be nested."""
        visits = 0
        stack: list[tuple[str, int]] = [(initial, 1)]
        while stack:
            name, depth = stack.pop()
            visits += 1
            if visits > MAX_NESTED_STATES or depth > MAX_NESTING:
                return False
            nexts = {t["next_state"] for t in self.states[name]["transitions"]}
            stack.extend((n, depth + 1) for n in nexts if n is not None)
        return True

    def _loop(self, initial: str) -> None:
        """Emit states as branches of a loop."""
        e = self.emitter
        e.line(f"_state = {self.numbers[initial]}")
        e.raise_flag("changed")
        with e.block(f"for _ in range({MAX_STEPS}):"):
            for count, name in enumerate(self.states):
                with e.block(f"{'el' if count else ''}if _state == {self.numbers[name]}:"):
                    self._state(name, ParserPlace(None))
            with e.block("if not _state:"):
                e.line("break")
        with e.block("else:"):
            self.error(self.codes["ParserTimeout"])

    def _state(self, name: str, place: ParserPlace) -> None:
        state = self.states[name]
        self.emitter.trace("state", name=self.emitter.text(name))
        for op in state["parser_ops"]:
            if op["op"] not in OPS:
                self.emitter.config.problem(f"parser operation {op['op']} is not supported", op, state)
                continue
            place = OPS[op["op"]](self, place, op["parameters"], op)
        self._transitions(state, place)

    # Transitions

    def _transitions(self, state: Json, place: ParserPlace) -> None:
        default: str | None = None
        cases: list[tuple[list[str], str | None]] = []
        keys = self._keys(state, place)
        for transition in state["transitions"]:
            if transition["type"] == "default":
                default = transition["next_state"]
            elif transition["type"] == "hexstr":
                tests = _tests(keys, transition)
                if tests is not None:
                    cases.append((tests, transition["next_state"]))
            else:
                self.emitter.config.problem(
                    f"a transition on a {transition['type']} is not supported", transition, state
                )
        self._cases(cases, default, place)

    def _cases(
        self, cases: list[tuple[list[str], str | None]], default: str | None, place: ParserPlace
    ) -> None:
        """Emit an if-elif-else chain; a case without tests always holds, so later cases are omitted."""
        keyword = "if"
        for tests, target in cases:
            if not tests:
                default = target
                break
            with self.emitter.block(f"{keyword} {' and '.join(tests)}:"):
                self._go(target, place)
            keyword = "elif"
        if keyword == "if":
            self._go(default, place)
        else:
            with self.emitter.block("else:"):
                self._go(default, place)

    def _go(self, target: str | None, place: ParserPlace) -> None:
        if self.looped:
            self.emitter.line(f"_state = {self.numbers[target] if target else 0}")
        elif target is None:
            if place.offset is not None:
                self.emitter.assign("at", place.code)
        else:
            self._state(target, place)

    def _keys(self, state: Json, place: ParserPlace) -> list[tuple[Value, int]]:
        """Return the fields that a state selects on, each with its width."""
        keys = []
        for count, key in enumerate(state["transition_key"]):
            if key["type"] == "field":
                width = self.emitter.width(key["value"])
                value = fit(self.emitter.load(key["value"]), width)
            elif key["type"] == "lookahead":
                width = key["value"][1]
                value = self.lookahead(place, key["value"])
            else:
                self.emitter.config.problem(f"selecting on a {key['type']} is not supported", key, state)
                value, width = number(0), 1
            if value.op and len(state["transitions"]) > 1:
                self.emitter.line(f"_key{count} = {value.code}")
                value = variable(f"_key{count}", width)
            keys.append((value, width))
        return keys

    # Positions, for the operations

    @contextmanager
    def stop(self, place: ParserPlace) -> Iterator[None]:
        """Yield a block that ends parsing at its position."""
        yield
        if place.offset is not None:
            self.emitter.assign("at", place.code)
        self.emitter.line("break")

    def error(self, error: Value) -> None:
        """Set the parser's error."""
        self.emitter.store(["standard_metadata", "parser_error"], error)
        name = self.emitter.config.errors.get(error.constant or 0, error.code)
        self.emitter.trace("parser_error", error=self.emitter.text(name))

    def need(self, place: ParserPlace, count: int | str) -> None:
        """Emit a stop with `PacketTooShort` unless there are `count` more bytes."""
        with self.emitter.block(f"if size < {place.plus(count)}:"), self.stop(place):
            self.error(self.codes["PacketTooShort"])

    def fail_unless(self, test: Value, error: Value, place: ParserPlace) -> None:
        """Emit a stop with an error unless a condition holds."""
        with self.emitter.block(f"if not ({test.code}):"), self.stop(place):
            self.error(error)

    def lookahead(self, place: ParserPlace, span: list[int]) -> Value:
        """Return bits ahead (offset, width) as an unsigned value; emit a stop if the packet is too short."""
        offset, width = span
        end = (offset + width + BYTE - 1) // BYTE
        self.need(place, end)
        first = offset // BYTE
        size = end - first
        if size == 1:
            whole = variable(f"frame[{place.plus(first)}]", BYTE)
        elif size in (2, 4, 8):
            reader = self.emitter.bind(
                "read", Struct({2: "!H", 4: "!I", 8: "!Q"}[size]).unpack_from, str(size)
            )
            whole = variable(f"{reader}(frame, {place.plus(first)})[0]", size * BYTE)
        else:
            whole = variable(
                f'int.from_bytes(frame[{place.plus(first)}:{place.plus(end)}], "big")', size * BYTE
            )
        return fit(OPERATORS[">>"](whole, number(end * BYTE - offset - width)), width)

    def advance(self, place: ParserPlace, count: int, header: str | None = None) -> ParserPlace:
        """Return the place after `count` bytes."""
        if place.offset is None:
            self.emitter.line(f"at += {count}")
            return place
        extracted = place.extracted + ((header,) if header else ())
        return ParserPlace(place.offset + count, extracted)


def _extract(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    if parameters[0]["type"] != "regular":
        p.emitter.config.problem(f"extracting a {parameters[0]['type']} is not supported", op)
        return place
    e = p.emitter
    header = parameters[0]["value"]
    layout = e.layout(header)
    p.need(place, layout.size)
    live = [chunk for chunk in layout.chunks if e.live(chunk.name)]
    if live:
        reader = e.bind("unpack", layout.unpacker(live).unpack_from, header)
        e.line(f"{', '.join(chunk.name for chunk in live)}, = {reader}(frame, {place.code})")
    e.assign(e.flag(header, "valid"), "1")
    e.assign(e.flag(header, "at"), place.code)
    e.findings.offsets.setdefault(header, set()).add(place.offset)
    if header in place.extracted or place.offset is None:
        e.mark_clean(header)
    if not _in_order(p.order, (*place.extracted, header)):
        e.raise_flag("changed")
    return p.advance(place, layout.size, header)


def _in_order(order: list[str], extracted: tuple[str, ...]) -> bool:
    """Return whether emitting these headers gives their bytes in the received order."""
    places = [order.index(header) if header in order else -1 for header in extracted]
    return all(a < b for a, b in zip([-1, *places[:-1]], places, strict=True))


def _set(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    target, source = parameters
    if source["type"] == "lookahead":
        value = p.lookahead(place, source["value"])
    else:
        value = p.emitter.value(source, op, p.emitter.config.parser)
    p.emitter.store(target["value"], value)
    return place


def _verify(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    test, error = parameters
    p.fail_unless(p.emitter.condition(test, op), p.emitter.value(error, op), place)
    return place


def _shift(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    """Skip bytes without a header: they are removed from the packet."""
    count = int(parameters[0]) if isinstance(parameters[0], int) else int(parameters[0]["value"])
    p.need(place, count)
    p.emitter.raise_flag("changed")
    return p.advance(place, count)


def _advance(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    """Skip a number of bits, given as a constant or an expression."""
    bits = p.emitter.value(parameters[0], op)
    e = p.emitter
    invalid = p.codes["ParserInvalidArgument"]
    e.raise_flag("changed")
    if bits.constant is not None:
        if bits.constant % BYTE:
            p.fail_unless(truth("False"), invalid, place)
            return place
        p.need(place, bits.constant // BYTE)
        return p.advance(place, bits.constant // BYTE)
    e.line(f"_bits = {bits.code}")
    p.fail_unless(truth("_bits % 8 == 0"), invalid, place)
    p.need(place, "_bits // 8")
    e.line(f"at = {place.plus('_bits // 8')}")
    return ParserPlace(None, place.extracted)


def _primitive(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    emit_primitive(p.emitter, parameters[0], op)
    return place


OPS: dict[str, Callable[[ParserEmitter, ParserPlace, list[Json], Json], ParserPlace]] = {
    "extract": _extract,
    "set": _set,
    "verify": _verify,
    "shift": _shift,
    "advance": _advance,
    "primitive": _primitive,
}
"""BMv2's parser operations; each emits its code and returns the parser's new position."""


def _tests(keys: list[tuple[Value, int]], transition: Json) -> list[str] | None:
    """Return the conditions of a transition's value (fields in whole bytes); `None` if it never matches."""
    value = parse_hex(transition["value"])
    total = sum((width + 7) // 8 * 8 for _, width in keys)
    mask = (1 << total) - 1 if transition["mask"] is None else parse_hex(transition["mask"])
    tests = []
    shift = total
    for key, width in keys:
        shift -= (width + 7) // 8 * 8
        full = (1 << (width + 7) // 8 * 8) - 1
        key_mask = mask >> shift & full
        key_value = value >> shift & key_mask
        bits = (1 << width) - 1
        if key_value & ~bits:
            return None
        key_mask &= bits
        if key_mask:
            masked = key if key_mask == bits else chain("&", key, number(key_mask))
            tests.append(f"{paren(masked)} == {number(key_value).code}")
    return tests
