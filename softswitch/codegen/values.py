"""Python source of P4 values: integers with a known range, and the operators of BMv2's expressions.

BMv2 computes with unbounded integers, like Python, and truncates them where the compiler specifies it. With a
known range, most truncations can be omitted. A further operator is one line in `OPERATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

MAX_SHIFT = 4096
"""Limit of left shifts by a variable: more than the width of any field, so that results are right."""


MAX_BITS = 4 * MAX_SHIFT
"""Bits of a value that is not truncated: a chain of multiplications takes seconds for each packet."""


class OperatorError(Exception):
    """Operands for which an operator is not defined; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Value:
    """Source of an integer (or truth value), and its known range.

    Attributes:
        code: The source.
        low: Lower bound of the value, `None` if unknown.
        high: Upper bound of the value, `None` if unknown.
        op: The outermost operator of `code`, empty if it needs no parentheses.
    """

    code: str
    low: int | None = None
    high: int | None = None
    op: str = ""
    truth: bool = False
    negated: Value | None = None
    """For `~x`: x."""

    @property
    def constant(self) -> int | None:
        """The value if it is known, else `None`."""
        return self.low if self.low == self.high else None

    def within(self, low: int, high: int) -> bool:
        """Return whether the value is known to be in low..high."""
        return self.low is not None and self.high is not None and low <= self.low and self.high <= high


def number(value: int) -> Value:
    """Return a constant."""
    code = str(value) if abs(value) < 1024 else hex(value)
    return Value(code, value, value, op="-" if value < 0 else "")


def variable(name: str, width: int, signed: bool = False) -> Value:
    """Return a variable that always holds a value of its P4 type."""
    if signed:
        return Value(name, -(1 << (width - 1)), (1 << (width - 1)) - 1)
    return Value(name, 0, (1 << width) - 1)


def truth(code: str, op: str = "") -> Value:
    """Return a condition."""
    return Value(code, 0, 1, op, truth=True)


def paren(value: Value) -> str:
    """Return source that can be combined with any operator."""
    return f"({value.code})" if value.op else value.code


def chain(op: str, left: Value, right: Value, low: int | None = None, high: int | None = None) -> Value:
    """Return `left op right`; chains of one associative operator stay flat."""
    if any(limit is not None and limit.bit_length() > MAX_BITS for limit in (low, high)):
        raise OperatorError(
            f"a value of more than {MAX_BITS:,} bits, before it is truncated, is not supported"
        )
    flat = left.op == op and op in ("+", "|", "&", "^", "and", "or")
    return Value(f"{left.code if flat else paren(left)} {op} {paren(right)}", low, high, op)


def fit(value: Value, width: int, signed: bool = False) -> Value:
    """Return the value truncated to a P4 type, in two's complement if it is signed."""
    if signed:
        return _two_comp_mod(value, number(width))
    return _and(value, number((1 << width) - 1))


def as_int(value: Value) -> Value:
    """Return a truth value as 0 or 1."""
    return Value(f"1 if {value.code} else 0", 0, 1, "if") if value.truth else value


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _plus(left: Value, right: Value | None = None) -> Value:
    if right is None or right.constant == 0:
        return left
    return chain("+", left, right, _sum(left.low, right.low), _sum(left.high, right.high))


def _minus(left: Value, right: Value | None = None) -> Value:
    if right is None:
        left, right = number(0), left
    low = None if right.high is None else -right.high
    high = None if right.low is None else -right.low
    return chain("-", left, right, _sum(left.low, low), _sum(left.high, high))


def _multiply(left: Value, right: Value) -> Value:
    if left.low is None or left.high is None or right.low is None or right.high is None:
        raise OperatorError("* needs operands of known widths")
    ends = [a * b for a in (left.low, left.high) for b in (right.low, right.high)]
    return chain("*", left, right, min(ends), max(ends))


def _divide(op: str, left: Value, right: Value) -> Value:
    by = right.constant
    if by is None or by <= 0 or left.low is None or left.low < 0:
        raise OperatorError(f"{op} is supported only for unsigned values and a constant above 0")
    if op == "%" and left.high is not None and left.high < by:
        return left
    high = by - 1 if op == "%" else None if left.high is None else left.high // by
    return chain("//" if op == "/" else op, left, right, 0, high)


def _shift_left(left: Value, right: Value) -> Value:
    if right.low is None or right.low < 0:
        raise OperatorError("a shift needs an unsigned amount")
    if left.low is None or left.high is None:
        raise OperatorError("<< needs an operand of a known width")
    if right.constant == 0:
        return left
    if right.high is None or right.high > MAX_SHIFT:
        right = Value(f"min({right.code}, {MAX_SHIFT})", min(right.low, MAX_SHIFT), MAX_SHIFT)
    assert right.low is not None
    assert right.high is not None
    ends = [limit << by for limit in (left.low, left.high) for by in (right.low, right.high)]
    return chain("<<", left, right, min(ends), max(ends))


def _shift_right(left: Value, right: Value) -> Value:
    if right.low is None or right.low < 0:
        raise OperatorError("a shift needs an unsigned amount")
    if right.constant == 0:
        return left
    by = min(right.low, MAX_SHIFT)
    if left.low is None or left.high is None:
        return chain(">>", left, right)
    return chain(">>", left, right, min(left.low, left.low >> by), max(left.high >> by, 0))


def _unsigned(value: Value) -> bool:
    return value.low is not None and value.low >= 0


def _and(left: Value, right: Value) -> Value:
    if left.constant is not None and right.constant is None:
        left, right = right, left
    mask = right.constant
    if mask is not None and mask >= 0 and mask & (mask + 1) == 0:
        if left.within(0, mask):
            return left
        if left.negated is not None:
            return chain("^", _and(left.negated, right), right, 0, mask)
    if left.constant is not None and mask is not None:
        return number(left.constant & mask)
    highs = [v.high for v in (left, right) if _unsigned(v) and v.high is not None]
    return chain(
        "&",
        left,
        right,
        0 if highs or _unsigned(left) or _unsigned(right) else None,
        min(highs, default=None),
    )


def _merge(op: str, left: Value, right: Value) -> Value:
    if left.constant == 0:
        return right
    if right.constant == 0:
        return left
    bounds = (left.low, left.high, right.low, right.high)
    bits = max((limit.bit_length() for limit in bounds if limit is not None), default=0)
    low = 0 if _unsigned(left) and _unsigned(right) else None if None in bounds else -(1 << bits)
    return chain(op, left, right, low, None if None in bounds else (1 << bits) - 1)


def _invert(value: Value) -> Value:
    low = None if value.high is None else ~value.high
    high = None if value.low is None else ~value.low
    return Value(f"~{paren(value)}", low, high, "~", negated=value)


def _compare(op: str, left: Value, right: Value) -> Value:
    return truth(f"{paren(left)} {op} {paren(right)}", op)


def _logic(op: str, left: Value, right: Value) -> Value:
    return replace(chain(op, _to_truth(left), _to_truth(right), 0, 1), truth=True)


def _not(value: Value) -> Value:
    return truth(f"not {paren(value)}", "not")


def _either(cond: Value, left: Value, right: Value) -> Value:
    low = None if left.low is None or right.low is None else min(left.low, right.low)
    high = None if left.high is None or right.high is None else max(left.high, right.high)
    code = f"{paren(left)} if {paren(cond)} else {paren(right)}"
    return Value(code, low, high, "if", truth=left.truth and right.truth)


def _to_truth(value: Value) -> Value:
    if value.truth or value.within(0, 1):
        return replace(value, truth=True)
    return truth(f"{paren(value)} != 0", "!=")


def _width(value: Value) -> int:
    if value.constant is None or not 0 < value.constant <= MAX_SHIFT:
        raise OperatorError("a cast needs a constant width")
    return value.constant


def _two_comp_mod(value: Value, width: Value) -> Value:
    bits = _width(width)
    half = 1 << (bits - 1)
    if value.within(-half, half - 1):
        return value
    code = f"({paren(value)} + {number(half).code} & {number(2 * half - 1).code}) - {number(half).code}"
    return Value(code, -half, half - 1, "-")


def _saturate(value: Value, low: int, high: int) -> Value:
    """Return a value clamped to low..high, without tests of bounds that it cannot exceed."""
    below = value.low is None or value.low < low
    above = value.high is None or value.high > high
    low_code, high_code = number(low).code, number(high).code
    if below and above:
        code = f"{low_code} if (_t := {value.code}) < {low_code} else {high_code} if _t > {high_code} else _t"
    elif below:
        code = f"_t if (_t := {value.code}) > {low_code} else {low_code}"
    elif above:
        code = f"_t if (_t := {value.code}) < {high_code} else {high_code}"
    else:
        return value
    return Value(code, low, high, "if")


def _usat_cast(value: Value, width: Value) -> Value:
    return _saturate(value, 0, (1 << _width(width)) - 1)


def _sat_cast(value: Value, width: Value) -> Value:
    half = 1 << (_width(width) - 1)
    return _saturate(value, -half, half - 1)


OPERATORS: dict[str, Callable[..., Value]] = {
    "+": _plus,
    "-": _minus,
    "*": _multiply,
    "/": partial(_divide, "/"),
    "%": partial(_divide, "%"),
    "<<": _shift_left,
    ">>": _shift_right,
    "&": _and,
    "|": partial(_merge, "|"),
    "^": partial(_merge, "^"),
    "~": _invert,
    "==": partial(_compare, "=="),
    "!=": partial(_compare, "!="),
    "<": partial(_compare, "<"),
    "<=": partial(_compare, "<="),
    ">": partial(_compare, ">"),
    ">=": partial(_compare, ">="),
    "and": partial(_logic, "and"),
    "or": partial(_logic, "or"),
    "not": _not,
    "?": _either,
    "d2b": _to_truth,
    "b2d": as_int,
    "two_comp_mod": _two_comp_mod,
    "usat_cast": _usat_cast,
    "sat_cast": _sat_cast,
}
"""BMv2's expression operators; each takes its operands in the order condition, left, right."""
