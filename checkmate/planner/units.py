"""Parsing and formatting of values with units, such as `10ms` or `419 in 54d on 16384`. Pure.

Numbers without a unit are rejected if they are ambiguous. Every parser accepts text or a value from YAML, and
raises `UnitError`, which quotes the value and describes a correct one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Final

HOUR_S: Final = 3600.0
DAY_HOURS: Final = 24.0
NODES_MAX: Final = 16
"""Shadow nodes of a DP group up to which plans compare their numbers."""

_TIME_S: Final = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0,
    "h": HOUR_S, "d": 86_400.0, "w": 7 * 86_400.0, "y": 365 * 86_400.0,
}  # fmt: skip
_DISPLAY_UNITS: Final = ("us", "ms", "s", "min", "h", "d")
_PREFIXES: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES: Final = {f"{prefix}B": size for prefix, size in _PREFIXES.items()}
_PER_HOUR: Final = {
    "": 1.0, "/h": 1.0, "/d": 1 / 24, "/w": 1 / (7 * 24), "/y": 1 / (365 * 24),
    "/hour": 1.0, "/day": 1 / 24, "/week": 1 / (7 * 24), "/year": 1 / (365 * 24),
}  # fmt: skip

_NUMBER: Final = r"\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?"
_QUANTITY: Final = re.compile(
    rf"(?P<sign>[+-]?)(?P<dollar>\$?)(?P<number>{_NUMBER})\s*(?P<unit>[^\d\s]*)", re.ASCII
)
_OBSERVED: Final = re.compile(rf"(?P<failures>{_NUMBER}) in (?P<time>.+) on (?P<units>{_NUMBER})", re.ASCII)
_LARGEST: Final = 1e30


class UnitError(ValueError):
    """An invalid value; the message quotes it and describes a correct one."""


def seconds(value: object) -> float:
    """Parse a time such as `10ms`, `1.2s`, `30min`, `54d` or `2w` to seconds. 0 needs no unit."""
    text = _text(value)
    if re.fullmatch(r"0(\.0*)?", text):
        return 0.0
    return _quantity(value, _TIME_S, "a time such as 10ms, 1.2s, 30min, 6h or 54d")


def failures_per_hour(value: object) -> float:
    """Parse failures per hour of one GPU or node: `2e-5`, `0.17/y`, `1/week`, `419 in 54d on 16384`."""
    right = "failures per hour of one GPU or node such as 2e-5, 0.17/y or '419 in 54d on 16384'"
    match = _OBSERVED.fullmatch(_text(value))
    if not match:
        return _quantity(value, _PER_HOUR, right)
    hours = seconds(match["time"]) / HOUR_S
    units = _float(match["units"])
    if not hours or not units:
        raise UnitError(f"must be {right}, not {_excerpt(value)}, which has no time or no units")
    return _float(match["failures"]) / hours / units


def share(value: object) -> float:
    """Parse a share such as `1.5%`. 0 needs no unit."""
    if re.fullmatch(r"0(\.0*)?", _text(value)):
        return 0.0
    return _quantity(value, {"%": 0.01}, "a share such as 1.5%")


def count(value: object) -> int:
    """Parse a whole number: `16384` or `16,384`."""
    right = "a whole number such as 16384"
    number = _quantity(value, {"": 1.0}, right)
    if number != int(number):
        raise UnitError(f"must be {right}, not {_excerpt(value)}")
    return int(number)


def show_seconds(value_s: float) -> str:
    """Format a time with three digits in a fitting unit: `10 ms`, `4.58 s`, `2.7 min`."""
    fitting = [unit for unit in _DISPLAY_UNITS if _TIME_S[unit] <= abs(value_s) * (1 + 1e-9)]
    unit = fitting[-1] if fitting else "s" if not value_s else "us"
    number = value_s / _TIME_S[unit]
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def show_enough(value: float) -> str:
    """Format a positive value with three digits, rounded up so that it suffices."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / step * (1 - 1e-9)) * step:.6g}"


def show_dollars(value: float) -> str:
    """Format dollars: `$3.45 million`, `$48,300`."""
    sign = "-" if value < 0 else ""
    if abs(value) >= 999_500:
        return f"{sign}${abs(value) / 1e6:,.2f} million"
    return f"{sign}${abs(value):,.0f}"


def _quantity(value: object, units: Mapping[str, float], right: str) -> float:
    """Parse a finite, non-negative value to the base unit of `units`."""
    match = _QUANTITY.fullmatch(_text(value))
    if not match:
        raise UnitError(f"must be {right}, not {_excerpt(value)}")
    if match["sign"] == "-":
        raise UnitError(f"must be {right}, and not negative like {_excerpt(value)}")
    unit = match["unit"]
    if match["dollar"]:
        unit = "$" + unit.removeprefix("$")
    if unit not in units:
        unit_names = ", ".join(name for name in units if name)
        why = (
            f"has no unit (one of {unit_names})"
            if not unit
            else f"has the unit {unit!r}, which is not one of {unit_names}"
        )
        raise UnitError(
            f"must be {right}; {_excerpt(value)} {why}"
            if unit_names
            else f"must be {right}, not {_excerpt(value)}"
        )
    number = _float(match["number"]) * units[unit]
    if not number <= _LARGEST:
        raise UnitError(f"must be {right}; {_excerpt(value)} is too large")
    return number


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    return str(value).strip()


def _excerpt(value: object) -> str:
    text = f"{value!r}" if isinstance(value, str) else f"{value}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _float(text: str) -> float:
    return float(text.replace(",", ""))


price_per_hour: Final = partial(
    _quantity,
    units={"": 1.0, "$": 1.0, "$/h": 1.0, "$/GPU-hour": 1.0, "$/node-hour": 1.0},
    right="dollars per hour such as 11.06",
)
"""Parse dollars per hour of one GPU or node: `11.06`, `$11.06` or `11.06 $/h`."""
amount: Final = partial(
    _quantity,
    units={"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
    right="a number such as 405e9 or 405B",
)
"""Parse a large number: `405e9` or `405B`; K, M, B and T are powers of 1,000."""
bytes_per_second: Final = partial(
    _quantity,
    units={f"{unit}/s": size for unit, size in _BYTES.items()},
    right="bytes per second such as 2TB/s or 500GB/s",
)
"""Parse a bandwidth such as `2TB/s`; prefixes are powers of 1,000."""
bits_per_second: Final = partial(
    _quantity,
    units={
        f"{prefix}{unit}": size for prefix, size in _PREFIXES.items() for unit in ("bit/s", "bps") if prefix
    },
    right="a line rate such as 100Gbit/s",
)
"""Parse a line rate such as `100Gbit/s`; prefixes are powers of 1,000."""
nbytes: Final = partial(_quantity, units=_BYTES, right="a size such as 128GB")
"""Parse a size of memory such as `128GB`; prefixes are powers of 1,000."""
flops: Final = partial(
    _quantity,
    units={f"{prefix}FLOPS": size for prefix, size in _PREFIXES.items() if prefix},
    right="operations per second such as 400TFLOPS",
)
"""Parse floating-point operations per second, such as `400TFLOPS`."""
