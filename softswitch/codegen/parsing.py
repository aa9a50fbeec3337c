"""The parser, as Python source.

States are written out one inside the other, so that each knows at which byte it stands. Where that would get
too long, or a state comes back to itself, they become the branches of a loop instead.
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

MAX_NESTED_STATES = 128
MAX_NESTING = 24
MAX_STEPS = 4096
"""A parser that has gone through so many states without an end gives up with `ParserTimeout`."""
BYTE = 8


@dataclass(frozen=True, slots=True)
class ParserPlace:
    """Where the parser stands: at a known byte, or (`None`) at the variable `at`; and what it extracted."""

    known: int | None
    extracted: tuple[str, ...] = ()
    depth: int = 0

    @property
    def code(self) -> str:
        """Source of the byte's number."""
        return "at" if self.known is None else str(self.known)

    def plus(self, count: int) -> str:
        """Source of a byte further on."""
        return f"at + {count}" if self.known is None else str(self.known + count)


class ParserEmitter:
    """Writes one parser."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.states: dict[str, Json] = {s["name"]: s for s in emitter.config.parser["parse_states"]}
        self.codes = {name: code for code, name in emitter.config.errors.items()}
        self.order = emitter.config.deparser["order"]
        self.numbers = {name: number_ for number_, name in enumerate(self.states, 1)}
        self.looped = False

    def emit(self) -> None:
        """Write the parser; behind it `at` is the payload's first byte."""
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
        """Whether states can be written out one inside the other."""
        seen = 0
        stack: list[tuple[str, int]] = [(initial, 1)]
        while stack:
            name, depth = stack.pop()
            seen += 1
            if seen > MAX_NESTED_STATES or depth > MAX_NESTING:
                return False
            nexts = {t["next_state"] for t in self.states[name]["transitions"]}
            stack.extend((n, depth + 1) for n in nexts if n is not None)
        return True

    def _loop(self, initial: str) -> None:
        """States as branches of a loop."""
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
            self._error("ParserTimeout")

    def _state(self, name: str, place: ParserPlace) -> None:
        state = self.states[name]
        self.emitter.trace(f"state({name!r})")
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
        keys, widths = self._keys(state, place)
        for transition in state["transitions"]:
            if transition["type"] == "default":
                default = transition["next_state"]
            elif transition["type"] == "hexstr":
                tests = _tests(keys, widths, transition)
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
        """An if-elif-else chain; a case without tests always holds, so what is behind it doesn't count."""
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
            if place.known is not None:
                self.emitter.assign("at", place.code)
        else:
            self._state(target, place)

    def _keys(self, state: Json, place: ParserPlace) -> tuple[list[Value], list[int]]:
        """The fields that a state selects on: values and widths."""
        keys, widths = [], []
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
            keys.append(value)
            widths.append(width)
        return keys, widths

    # Operations

    @contextmanager
    def _stop(self, place: ParserPlace) -> Iterator[None]:
        """A block that ends parsing where it stands."""
        yield
        if place.known is not None:
            self.emitter.assign("at", place.code)
        self.emitter.line("break")

    def _error(self, name: str) -> None:
        if self.emitter.known("standard_metadata", "parser_error"):
            self.emitter.store(["standard_metadata", "parser_error"], number(self.codes[name]))
        self.emitter.trace(f"parser_error({name!r})")

    def need(self, place: ParserPlace, count: int) -> None:
        """Stop with `PacketTooShort` unless there are so many more bytes."""
        with self.emitter.block(f"if size < {place.plus(count)}:"), self._stop(place):
            self._error("PacketTooShort")

    def fail_unless(self, test: Value, error: Value, place: ParserPlace) -> None:
        """Stop with an error unless a condition holds."""
        with self.emitter.block(f"if not ({test.code}):"), self._stop(place):
            if self.emitter.known("standard_metadata", "parser_error"):
                self.emitter.store(["standard_metadata", "parser_error"], error)
            name = self.emitter.config.errors.get(error.constant or 0, error.code)
            self.emitter.trace(f"parser_error({name!r})")

    def lookahead(self, place: ParserPlace, span: list[int]) -> Value:
        """Bits ahead (offset, width) as an unsigned value; stops if the packet is too short."""
        offset, width = span
        end = (offset + width + BYTE - 1) // BYTE
        self.need(place, end)
        first = offset // BYTE
        size = end - first
        if size == 1:
            whole = variable(f"frame[{place.plus(first)}]", BYTE)
        elif size in (2, 4, 8):
            reader = self.emitter.bind(f"read_{size}", Struct({2: "!H", 4: "!I", 8: "!Q"}[size]).unpack_from)
            whole = variable(f"{reader}(frame, {place.plus(first)})[0]", size * BYTE)
        else:
            whole = variable(
                f'int.from_bytes(frame[{place.plus(first)}:{place.plus(end)}], "big")', size * BYTE
            )
        return fit(OPERATORS[">>"](whole, number(end * BYTE - offset - width)), width)

    def moved(self, place: ParserPlace, count: int, header: str | None = None) -> ParserPlace:
        """The place after `count` bytes."""
        if place.known is None:
            self.emitter.line(f"at += {count}")
            return place
        extracted = place.extracted + ((header,) if header else ())
        return ParserPlace(place.known + count, extracted)


def _tests(keys: list[Value], widths: list[int], transition: Json) -> list[str] | None:
    """Conditions under which a transition's value (fields in whole bytes) is met; `None` for never."""
    value = parse_hex(transition["value"])
    total = sum((width + 7) // 8 * 8 for width in widths)
    mask = (1 << total) - 1 if transition["mask"] is None else parse_hex(transition["mask"])
    tests = []
    left = total
    for key, width in zip(keys, widths, strict=True):
        left -= (width + 7) // 8 * 8
        full = (1 << (width + 7) // 8 * 8) - 1
        key_mask = mask >> left & full
        key_value = value >> left & key_mask
        bits = (1 << width) - 1
        if key_value & ~bits:
            return None
        key_mask &= bits
        if key_mask:
            masked = key if key_mask == bits else chain("&", key, number(key_mask))
            tests.append(f"{paren(masked)} == {number(key_value).code}")
    return tests


def _extract(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    if parameters[0]["type"] != "regular":
        p.emitter.config.problem(f"extracting a {parameters[0]['type']} is not supported", op)
        return place
    e = p.emitter
    header = parameters[0]["value"]
    layout = e.plan.layouts[header]
    p.need(place, layout.size)
    for chunk in layout.chunks:
        e.declare(chunk.name, chunk.zero)
    live = [chunk for chunk in layout.chunks if e.live(chunk.name)]
    if live:
        reader = e.bind(f"{header}_unpack", layout.unpacker(live).unpack_from)
        e.line(f"{', '.join(chunk.name for chunk in live)}, = {reader}(frame, {place.code})")
    e.assign(e.flag(header, "valid"), "1")
    e.assign(e.flag(header, "at"), place.code)
    e.found.offsets.setdefault(header, set()).add(place.known)
    if header in place.extracted or place.known is None:
        e.mark_clean(header)
    if not _in_order(p.order, (*place.extracted, header)):
        e.raise_flag("changed")
    return p.moved(place, layout.size, header)


def _in_order(order: list[str], extracted: tuple[str, ...]) -> bool:
    """Whether emitting these headers gives their bytes back in the order they came in."""
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
    """Skip bytes that no header keeps: they are gone from the packet."""
    count = int(parameters[0]) if isinstance(parameters[0], int) else int(parameters[0]["value"])
    p.need(place, count)
    p.emitter.raise_flag("changed")
    return p.moved(place, count)


def _advance(p: ParserEmitter, place: ParserPlace, parameters: list[Json], op: Json) -> ParserPlace:
    """Skip bits, given as a number or an expression."""
    bits = p.emitter.value(parameters[0], op)
    e = p.emitter
    invalid = number(p.codes["ParserInvalidArgument"])
    e.raise_flag("changed")
    if bits.constant is not None:
        if bits.constant % BYTE:
            p.fail_unless(truth("False"), invalid, place)
            return place
        p.need(place, bits.constant // BYTE)
        return p.moved(place, bits.constant // BYTE)
    e.line(f"_bits = {bits.code}")
    p.fail_unless(truth("_bits % 8 == 0"), invalid, place)
    with e.block(f"if size < {place.code} + _bits // 8:"), p._stop(place):
        p._error("PacketTooShort")
    e.line(f"at = {place.code} + _bits // 8")
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
"""BMv2's parser operations; each writes its code and says where the parser then stands."""
