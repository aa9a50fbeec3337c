"""The alert rules of deploy/, with shorter times, so that a game day need not last for hours. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

FASTER: Final = 4
"""Minutes in the rules are a quarter as long."""
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+)(ms|s|m|h)")
_INCREASE: Final = re.compile(r"increase\([^[]*\[(\d+(?:ms|s|m|h))\]")
_RANGE: Final = re.compile(r"\[(\d+(?:ms|s|m|h))\]")


@dataclass(frozen=True)
class Delays:
    """Seconds of an alert: how long its condition has to hold, and how long an increase is remembered."""

    waits: float
    remembers: float


def seconds(text: str) -> float:
    """Return the seconds of a duration of Prometheus, such as 1m30s."""
    return sum(int(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


def faster(rules: Mapping[str, Any], by: float = FASTER) -> dict[str, Any]:
    """Return rules whose `for` and ranges are shorter."""
    groups = [{**group, "rules": [_faster(rule, by) for rule in group["rules"]]} for group in rules["groups"]]
    return {"groups": groups}


def delays(rules: Mapping[str, Any]) -> dict[str, Delays]:
    """Return the delays of each alert."""
    delays_by_alert = {}
    for group in rules["groups"]:
        for rule in group["rules"]:
            ranges = [seconds(match) for match in _INCREASE.findall(rule["expr"])]
            delays_by_alert[rule["alert"]] = Delays(seconds(rule.get("for", "0s")), max(ranges, default=0.0))
    return delays_by_alert


def _faster(rule: Mapping[str, Any], by: float) -> dict[str, Any]:
    changed_rule = {**rule, "expr": _RANGE.sub(lambda match: f"[{_shorter(match[1], by)}]", rule["expr"])}
    return changed_rule | ({"for": _shorter(rule["for"], by)} if "for" in rule else {})


def _shorter(text: str, by: float) -> str:
    return f"{round(seconds(text) * 1000 / by)}ms"
