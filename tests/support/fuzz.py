"""Fuzz tests of parsers: a few examples in `make test`, as many as a number of seconds allows in a campaign.

`CHECKMATE_FUZZ_SECONDS=300 python -m pytest -m fuzz -rP` runs each of them for 5 minutes, and prints how many
examples it had.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS_VARIABLE: Final = "CHECKMATE_FUZZ_SECONDS"
ROUND: Final = 4
"""A campaign's rounds have this many times the examples of `make test`; each has a new seed."""
DEADLINE_S: Final = 300

Test = Callable[..., None]
Strategies = dict[str, st.SearchStrategy[Any]]


def positive(variable: str, default: int) -> int:
    """Return the whole number of an environment variable; stop pytest if it is not one, or below 0."""
    text = os.environ.get(variable, str(default))
    if not text.isascii() or not text.isdigit():
        raise pytest.UsageError(f"{variable}={text}: must be a whole number from 0 on")
    return int(text)


def fuzz(examples: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Make a function a fuzz test of `examples` examples, or of rounds until a campaign's time is over."""
    seconds = positive(SECONDS_VARIABLE, 0)
    options = settings(
        max_examples=examples * (ROUND if seconds else 1),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    def decorate(test: Test) -> Test:
        examples_run = 0

        @functools.wraps(test)
        def count_examples(*args: Any, **kwargs: Any) -> None:
            nonlocal examples_run
            examples_run += 1
            test(*args, **kwargs)

        property_test = options(given(**strategies)(count_examples))

        @functools.wraps(property_test)
        def rounds(*args: Any, **kwargs: Any) -> None:
            start = time.monotonic()
            property_test(*args, **kwargs)
            while time.monotonic() - start < seconds:
                property_test(*args, **kwargs)
            print(f"{examples_run} examples in {time.monotonic() - start:.0f} s")

        timeout = pytest.mark.timeout(DEADLINE_S + 2 * seconds)
        marked: Test = pytest.mark.fuzz(timeout(rounds))
        return marked

    return decorate


def damaged(data: st.DataObject, whole: bytes, most: int = 4) -> bytes:
    """Return bytes with up to `most` changed, and sometimes cut, repeated in part, or extended."""
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(0, most)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    match data.draw(st.integers(0, 5)):
        case 0:
            del raw[data.draw(st.integers(0, len(raw))) :]
        case 1:
            start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
            raw[start:start] = raw[start:end]
        case 2:
            raw += data.draw(st.binary(max_size=20))
    return bytes(raw)


_EDGES: Final = [0, 1, 2, 7, 255, 256, 0xFFFF, 1 << 20, 1 << 40, (1 << 62), -1, -2, -(1 << 62)]
_SIGNED: Final = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}
_UNSIGNED: Final = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def messages(kind: type[Message], **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a type with any fields, also nested ones, at edges of their types.

    `strategies` has strategies for fields of these names, at any depth. Most messages have them. `Type_name`
    is a field of one type only.
    """
    return st.composite(lambda draw: _filled(draw, kind(), strategies, 4))()


def _filled(draw: st.DrawFn, message: Message, strategies: Strategies, depth: int) -> Message:
    for field in message.DESCRIPTOR.fields:
        odds = 9 if _strategy_of(field, strategies) is not None else 4
        if draw(st.integers(0, 9)) < odds and (depth or field.message_type is None):
            _fill(draw, message, field, strategies, depth)
    return message


def _strategy_of(field: Any, strategies: Strategies) -> st.SearchStrategy[Any] | None:
    return strategies.get(f"{field.containing_type.name}_{field.name}", strategies.get(field.name))


def _fill(
    draw: st.DrawFn,
    message: Message,
    field: Any,
    strategies: Strategies,
    depth: int,
) -> None:
    content = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        for key in draw(st.lists(st.text(max_size=5), max_size=3)):
            if value.message_type is not None:
                _filled(draw, content[key], strategies, depth - 1)
            else:
                content[key] = _value(draw, value, strategies)
    elif field.is_repeated:
        for _ in range(draw(st.integers(0, 3))):
            if field.message_type is None:
                content.append(_value(draw, field, strategies))
            else:
                _filled(draw, content.add(), strategies, depth - 1)
    elif field.message_type is not None:
        content.SetInParent()
        _filled(draw, content, strategies, depth - 1)
    else:
        setattr(message, field.name, _value(draw, field, strategies))


def _value(draw: st.DrawFn, field: Any, strategies: Strategies) -> Any:
    usual = _strategy_of(field, strategies)
    if usual is not None and draw(st.integers(0, 9)):
        return draw(usual)
    if bits := _SIGNED.get(field.cpp_type):
        low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    elif bits := _UNSIGNED.get(field.cpp_type):
        low, high = 0, (1 << bits) - 1
    elif field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        low, high = -1, 12
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw(st.booleans())
    elif field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw(st.floats())
    elif field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.binary(max_size=20))
    else:
        return draw(st.text(max_size=20))
    edges = [edge for edge in _EDGES if low <= edge <= high] + [low, high]
    return draw(st.sampled_from(edges) | st.integers(low, high))
