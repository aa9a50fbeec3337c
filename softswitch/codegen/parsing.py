"""The parser as Python source.

States are nested, so that each has a known position in the frame. If that becomes too long, or if a state can
be reached from itself, they become the branches of a loop instead.
"""

from __future__ import annotations

from softswitch.codegen.emitter import Emitter, parse_hex
from softswitch.codegen.parser_ops import OPS, ParserBase, ParserPlace
from softswitch.codegen.values import Value, chain, fit, number, paren, variable
from softswitch.program.bmv2 import Json

MAX_NESTED_STATES = 128
MAX_NESTING = 24
MAX_STEPS = 4096
"""After this number of states, a parser stops with `ParserTimeout`."""


class ParserEmitter(ParserBase):
    """Emitter of one parser."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter)
        self.states: dict[str, Json] = {s["name"]: s for s in emitter.config.parser["parse_states"]}
        self.numbers = {name: number_ for number_, name in enumerate(self.states, 1)}
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
