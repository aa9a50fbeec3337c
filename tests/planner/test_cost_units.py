"""Values with units: valid ones are parsed, ambiguous ones are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.planner import units
from checkmate.planner.units import UnitError

PARSERS: tuple[Callable[[object], float], ...] = (
    units.seconds,
    units.price_per_hour,
    units.failures_per_hour,
    units.count,
    units.amount,
    units.bytes_per_second,
    units.flops,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.seconds, "10ms", 0.01),
        (units.seconds, "1.2 s", 1.2),
        (units.seconds, "30min", 1800),
        (units.seconds, "54d", 54 * 86_400),
        (units.seconds, "1w", 7 * 86_400),
        (units.seconds, "0", 0),
        (units.seconds, 0, 0),
        (units.seconds, "250us", 250e-6),
        (units.price_per_hour, 11.06, 11.06),
        (units.price_per_hour, "$11.06", 11.06),
        (units.price_per_hour, "11.06 $/h", 11.06),
        (units.price_per_hour, "11.06 $/GPU-hour", 11.06),
        (units.failures_per_hour, "1e-6", 1e-6),
        (units.failures_per_hour, "0.24/d", 0.01),
        (units.failures_per_hour, "8.76/y", 1e-3),
        (units.failures_per_hour, "1/week", 1 / 168),
        (units.failures_per_hour, "1.68 /w", 1e-2),
        (units.failures_per_hour, "8.76/year", 1e-3),
        (units.failures_per_hour, "1 in 1w on 1024", 1 / 168 / 1024),
        (units.failures_per_hour, "419 in 54d on 16,384", 419 / 54 / 24 / 16_384),
        (units.count, "16,384", 16_384),
        (units.count, 16_384, 16_384),
        (units.amount, "405B", 405e9),
        (units.amount, "4.05e11", 405e9),
        (units.bytes_per_second, "2TB/s", 2e12),
        (units.flops, "400TFLOPS", 400e12),
    ],
)
def test_what_is_written_is_read(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (units.seconds, "10", "'10' has no unit (one of us, ms, s, min, h, d, w, y)"),
        (units.seconds, 10, "10 has no unit"),
        (units.seconds, "10 parsecs", "'10 parsecs' has the unit 'parsecs'"),
        (units.seconds, "10MS", "unit 'MS'"),
        (units.seconds, "1 month", "has the unit 'month', which is not one of us, ms, s, min, h, d, w, y"),
        (units.failures_per_hour, "1/month", "the unit '/month', which is not one of /h, /d, /w, /y, /hour"),
        (units.seconds, "-3s", "not negative like '-3s'"),
        (units.seconds, "$3s", "unit '$s'"),
        (units.seconds, "1:30", "not '1:30'"),
        (units.seconds, None, "not None"),
        (units.seconds, True, "not True"),
        (units.seconds, ["1s"], "not ['1s']"),
        (units.seconds, float("nan"), "not nan"),
        (units.price_per_hour, "11.06 EUR", "dollars per hour"),
        (units.price_per_hour, "11,06", "not '11,06'"),
        (units.failures_per_hour, "419 in 54 on 16384", "'54' has no unit"),
        (units.failures_per_hour, "419 in 0s on 16384", "which has no time or no units"),
        (units.count, "16K", "a whole number such as 16384, not '16K'"),
        (units.count, "1.5", "a whole number"),
        (units.amount, "1e999", "too large"),
        (units.bytes_per_second, "2Tbit/s", "unit 'Tbit/s'"),
        (units.flops, "400", "400TFLOPS"),
        (units.count, "9" * 400, "..."),
    ],
)
def test_what_is_wrong_is_quoted_with_what_would_be_right(
    parse: Callable[[object], float], text: object, says: str
) -> None:
    with pytest.raises(UnitError) as excinfo:
        parse(text)
    assert says in str(excinfo.value)
    assert "must be" in str(excinfo.value)
    assert len(str(excinfo.value)) < 250


@given(
    st.text()
    | st.integers()
    | st.floats()
    | st.none()
    | st.booleans()
    | st.from_regex(r"[-+$]?\d+\.?\d* ?\w*/?\w*")
)
def test_anything_else_is_read_or_refused(value: object) -> None:
    for parse in PARSERS:
        try:
            quantity = parse(value)
        except UnitError:
            continue
        assert quantity >= 0
        assert math.isfinite(quantity)


@given(st.floats(1e-6, 1e10), st.sampled_from([("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("h", 3600.0)]))
def test_units_are_what_they_are(number: float, unit: tuple[str, float]) -> None:
    name, size = unit
    assert units.seconds(f"{number!r}{name}") == pytest.approx(number * size)
    assert units.seconds(f"{number!r} {name}") == units.seconds(f"{number!r}{name}")


@given(st.floats(1e-6, 9.9e7))
def test_a_time_that_is_shown_can_be_read_again(value_s: float) -> None:
    assert units.seconds(units.show_seconds(value_s)) == pytest.approx(value_s, rel=0.006)


def test_what_is_shown() -> None:
    texts = [units.show_seconds(value) for value in (0, 1e-9, 0.01, 4.58, 164.9, 54 * 86_400)]
    assert texts == ["0 s", "0.001 us", "10 ms", "4.58 s", "2.75 min", "54 d"]
    dollars = [units.show_dollars(value) for value in (3_447_775, 48_297, -2_446, 999_499, 999_501)]
    assert dollars == ["$3.45 million", "$48,297", "-$2,446", "$999,499", "$1.00 million"]
