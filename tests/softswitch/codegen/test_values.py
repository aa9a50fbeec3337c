"""Expressions: the generated source against plain integer arithmetic, and its assumed ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softswitch.codegen.values import MAX_SHIFT, OPERATORS, OperatorError, Value, fit, number, paren, variable

WIDTHS = st.integers(2, 40)
Tree = tuple[Any, ...]


@st.composite
def leaves(draw: st.DrawFn) -> Tree:
    """Return a constant, or a variable with a value of its type."""
    width = draw(WIDTHS)
    if draw(st.booleans()):
        return ("number", draw(st.integers(0, (1 << width) - 1)))
    signed = draw(st.booleans())
    half = 1 << (width - 1)
    value = draw(st.integers(-half, half - 1) if signed else st.integers(0, 2 * half - 1))
    return ("variable", width, signed, value)


def branches(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    """Return operators over smaller trees."""
    two = st.sampled_from(("+", "-", "*", "&", "|", "^", "==", "!=", "<", "<=", ">", ">="))
    casts = st.sampled_from(("two_comp_mod", "usat_cast", "sat_cast", "mask"))
    shifts = st.sampled_from(("<<", ">>"))
    return (
        st.tuples(two, inner, inner)
        | st.tuples(st.sampled_from(("~", "-", "d2b", "not")), inner)
        | st.tuples(casts, inner, WIDTHS)
        | st.tuples(shifts, inner, st.integers(0, 40))
        | st.tuples(st.sampled_from(("/", "%")), inner, st.integers(1, 300))
        | st.tuples(st.sampled_from(("and", "or")), inner, inner)
        | st.tuples(st.just("?"), inner, inner, inner)
    )


TREES = st.recursive(leaves(), branches, max_leaves=12)


def reference(tree: Tree) -> int:
    """Return the value of a tree; BMv2 computes without bounds, and truncates at casts."""
    op, *rest = tree
    if op in ("number", "variable"):
        return int(rest[-1])
    a = reference(rest[0])
    if op in ("two_comp_mod", "usat_cast", "sat_cast", "mask"):
        return cast(op, a, rest[1])
    if op in ("<<", ">>", "/", "%"):
        return DYADIC[op](a, rest[1])
    if op == "?":
        return reference(rest[1]) if a else reference(rest[2])
    if len(rest) == 1:
        return {"~": -a - 1, "-": -a, "d2b": int(a != 0), "not": int(not a)}[op]
    b = reference(rest[1])
    return int(BINARY[op](a, b))


DYADIC: dict[str, Callable[[int, int], int]] = {
    "<<": lambda a, by: a * 2**by,
    ">>": lambda a, by: a // 2**by,
    "/": lambda a, by: a // by,
    "%": lambda a, by: a % by,
}
BINARY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b),
}


def cast(op: str, value: int, width: int) -> int:
    """Return a wrapping or saturating cast (P4-16 specification, sections 8.6 and 8.7)."""
    half = 1 << (width - 1)
    if op == "mask":
        return value % (2 * half)
    if op == "two_comp_mod":
        wrapped = value % (2 * half)
        return wrapped - 2 * half if wrapped >= half else wrapped
    low, high = (0, 2 * half - 1) if op == "usat_cast" else (-half, half - 1)
    return sorted((low, value, high))[1]


def emit(tree: Tree, environment: dict[str, int]) -> Value:
    """Return the tree's source; add variables to the environment."""
    op, *rest = tree
    if op == "number":
        return number(rest[0])
    if op == "variable":
        name = f"v{len(environment)}"
        environment[name] = rest[2]
        return variable(name, rest[0], rest[1])
    if op == "mask":
        return OPERATORS["&"](emit(rest[0], environment), number((1 << rest[1]) - 1))
    if op in ("two_comp_mod", "usat_cast", "sat_cast", "<<", ">>", "/", "%"):
        return OPERATORS[op](emit(rest[0], environment), number(rest[1]))
    return OPERATORS[op](*(emit(child, environment) for child in rest))


@given(TREES)
def test_source_computes_what_bmv2_would(tree: Tree) -> None:
    environment: dict[str, int] = {}
    try:
        value = emit(tree, environment)
    except OperatorError as error:
        assert "supported only for unsigned" in str(error)
        return
    result = eval(value.code, {}, environment)
    assert bool(result) == bool(reference(tree)) if value.truth else result == reference(tree)
    assert value.low is None or value.low <= result
    assert value.high is None or result <= value.high


@given(TREES, WIDTHS, st.booleans())
def test_fit_cuts_to_the_type(tree: Tree, width: int, signed: bool) -> None:
    environment: dict[str, int] = {}
    try:
        value = fit(emit(tree, environment), width, signed)
    except OperatorError:
        return
    expected = cast("two_comp_mod" if signed else "mask", reference(tree), width)
    assert eval(value.code, {}, environment) == expected
    assert eval(f"0 + {paren(value)}", {}, environment) == expected


@pytest.mark.parametrize("amount", [0, 1, 31, 32, 33, 4096, 2**31])
def test_shifts_by_a_variable_are_bounded(amount: int) -> None:
    operand, by = variable("x", 32), variable("by", 32)
    shifted = fit(OPERATORS["<<"](operand, by), 32)
    assert (
        eval(shifted.code, {"min": min}, {"x": 0x80000001, "by": amount})
        == 0x80000001 << min(amount, 64) & 0xFFFFFFFF
    )
    right = OPERATORS[">>"](operand, by)
    assert eval(right.code, {}, {"x": 0x80000001, "by": amount}) == 0x80000001 >> amount
    assert str(MAX_SHIFT) in shifted.code


def test_needless_masks_are_left_out() -> None:
    small = variable("x", 8)
    assert fit(small, 16).code == "x"
    assert OPERATORS["&"](OPERATORS["~"](small), number(255)).code == "x ^ 255"
    assert (
        OPERATORS["usat_cast"](OPERATORS["-"](small, number(5)), number(8)).code
        == "_t if (_t := x - 5) > 0 else 0"
    )


@pytest.mark.parametrize("op", ["/", "%"])
def test_division_by_what_may_be_zero_is_refused(op: str) -> None:
    with pytest.raises(OperatorError, match="constant above 0"):
        OPERATORS[op](variable("x", 8), variable("y", 8))
    with pytest.raises(OperatorError, match="constant above 0"):
        OPERATORS[op](variable("x", 8), number(0))
