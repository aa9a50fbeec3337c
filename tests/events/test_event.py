"""Lines of event logs: one that could harm a reader is not an event."""

from __future__ import annotations

import json

import pytest

from checkmate.events.event import timestamp
from checkmate.events.reading import parse_event

_ESCAPE = "\x1b]0;owned\x07"


def line(**values: object) -> str:
    return json.dumps(
        {"time": "2026-11-23T10:00:00Z", "source": "rank 0", "event": "trainer.ended", **values}
    )


@pytest.mark.parametrize(
    "values",
    [
        {"source": _ESCAPE},
        {"event": _ESCAPE},
        {"job": _ESCAPE},
        {"job": "x" * 101},
        {"pid": -1},
        {"pid": 2**63},
        {"number": 10**400},
        {"fields": {"seconds": 10**400}},
        {"fields": {"seconds": float("nan")}},
    ],
)
def test_a_name_that_steers_terminals_and_a_number_without_bounds_are_refused(
    values: dict[str, object],
) -> None:
    parse_event(line())
    with pytest.raises(ValueError, match="_Line"):
        parse_event(line(**values))


def test_a_host_may_call_itself_anything_but_cannot_steer_terminals() -> None:
    assert parse_event(line(host=f"h{_ESCAPE}")).host == "h ]0;owned "
    assert len(parse_event(line(host="x" * 10_000)).host) == 255


@pytest.mark.parametrize(
    "time",
    [
        "9999-12-31T23:59:59-23:59",
        "9999-12-31T23:59:59",
        "0001-01-01T00:00:00+23:00",
        "0001-01-01T00:00:00",
        "9000-01-01T00:00:00Z",
        "1969-12-31T23:59:59Z",
    ],
)
def test_a_time_that_not_every_zone_can_show_is_refused(time: str) -> None:
    with pytest.raises(ValueError, match="year"):
        parse_event(line(time=time))


def test_the_first_and_the_last_time_can_be_shown() -> None:
    for time in ("1970-01-01T00:00:00.000000Z", "8999-12-31T23:59:59.000000Z"):
        assert timestamp(parse_event(line(time=time)).time) == time
