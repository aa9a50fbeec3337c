"""Types of values in a job's YAML file: addresses, ports, names and numbers, with their limits.

Limits are objects that pydantic asks for its core schema. They import pydantic only when they are asked:
trainers need the classes of a job (`schema`), but read a job that was checked before (`kept`), and pydantic
takes as long to import as all of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from checkmate.job.addresses import (
    checked_host,
    checked_host_port,
    checked_ip,
    checked_mac,
    checked_path,
    checked_source,
)
from checkmate.job.tofino import chips

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

FILE_BYTES: Final = 2 << 20
"""The largest file: a job of about 15,000 ranks."""


class ValueLimits:
    """Limits of a value, named as pydantic's core schemas name them."""

    def __init__(self, **limits: object) -> None:
        self.limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), **self.limits}


def whole(least: int, most: int | None = None) -> ValueLimits:
    """Return the limits of a whole number; YAML's `true` and `1.0` are not one."""
    return ValueLimits(strict=True, ge=least) if most is None else ValueLimits(strict=True, ge=least, le=most)


def items(least: int, most: int | None = None) -> ValueLimits:
    """Return the limits of a list's length."""
    return ValueLimits(min_length=least) if most is None else ValueLimits(min_length=least, max_length=most)


def at_most(items: int) -> ValueLimits:
    """Return the limit of a list's length."""
    return ValueLimits(max_length=items)


class Before:
    """A function that gets the value as it is in the file, and returns or refuses it (`ValueError`)."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function = function

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415 - see above

        return core_schema.no_info_before_validator_function(self.function, handler(source))


class After(Before):
    """A function that gets the value with its type, and returns or refuses it (`ValueError`)."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415 - see above

        return core_schema.no_info_after_validator_function(self.function, handler(source))


class Described:
    """What else a JSON Schema says about a value, for editors."""

    def __init__(self, **more: object) -> None:
        self.more = more

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {**handler(schema), **self.more}


_MAC_PATTERN: Final = "^[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}$"
"""Unicast addresses, for editors."""
_RATE_PATTERN: Final = r"^[0-9]{1,6}(\.[0-9]{1,6})?[MG]$"
_RATE: Final = re.compile(_RATE_PATTERN)
DSCP_BITS: Final = (1, 2, 4, 8, 16, 32)

CPU_PORT: Final = 510
"""CPU port of the v1model program (`CPU_PORT` in the P4 source)."""


def checked_dscp_bit(value: int) -> int:
    if value not in DSCP_BITS:
        raise ValueError("must be one of the six bits of DSCP: 1, 2, 4, 8, 16 or 32")
    return value


def _port(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(
            f"must be a number from 0 to {CPU_PORT - 1}; a front-panel name such as "
            '"1/0" is possible only on a switch whose target is tofino or tofino2'
        )
    return value


def no_gradients(value: object) -> object:
    """Refuse an address for gradients where switches copy them."""
    if value is not None:
        raise ValueError("is for copies by hosts (copies: host): remove it, gradients come to the nics")
    return value


def no_sending(value: object) -> object:
    """Refuse what is said about hosts' copies where switches copy."""
    values = value.values() if isinstance(value, dict) else [value or None]
    if any(element is not None for element in values):
        raise ValueError("is for copies by hosts (copies: host): remove it, switches send the copies")
    return value


def no_fewer_replicas(value: object) -> object:
    """Refuse that a job goes on with fewer replicas where switches copy."""
    if value is not None:
        raise ValueError(
            "is for copies by hosts (copies: host): a switch copies what the first and the last rank of a DP "
            "group send, as the job file has them; with other ranks in the file, training resumes from memory"
        )
    return value


def checked_rate(value: object) -> object:
    """Return a rate as a text. Raise `ValueError` unless it is a number of megabits or gigabits."""
    if not isinstance(value, str) or not _RATE.fullmatch(value) or not float(value[:-1]):
        raise ValueError("must be bits per second, such as 500M or 2.5G")
    return value


def device_port(value: object) -> object:
    """Accept a device port alone for a port of a Tofino's front panel."""
    return {"device_port": value} if isinstance(value, int) else value


Mac = Annotated[str, Before(checked_mac), Described(pattern=_MAC_PATTERN)]
Ip = Annotated[IPv4Address, Before(checked_ip)]
FilePath = Annotated[Path, Before(checked_path)]
HostName = Annotated[str, After(checked_host)]
HostPort = Annotated[str, After(checked_host_port), Described(pattern=r":[0-9]{1,5}$")]
Source = Annotated[str, After(checked_source)]
"""An interface's name, or a network."""
BitRate = Annotated[str, Before(checked_rate), Described(pattern=_RATE_PATTERN)]
Flag = Annotated[bool, ValueLimits(strict=True)]
Dscp = Annotated[int, whole(0, 63)]
Port = Annotated[int, whole(0, CPU_PORT - 1), Before(_port)]
PortName = Annotated[str, ValueLimits(pattern=chips.PORT_NAME)]
Collective = Literal["ring", "tree", "nccl"]
Speed = Literal["10G", "25G", "40G", "50G", "100G", "200G", "400G"]
Fec = Literal["none", "firecode", "rs"]
Metres = Annotated[float, ValueLimits(gt=0, le=10_000)]
Name = Annotated[str, ValueLimits(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
TcpPort = Annotated[int, whole(1, 65535)]
NODE_IDS_LAST: Final = 65535
RANKS_LAST: Final = 65535
GPUS_MOST: Final = 64
Size = Annotated[int, whole(1, RANKS_LAST + 1)]
"""Of a dimension of a mesh."""
Seconds = Annotated[int, whole(1, 86_400)]
ShadowNodeId = Annotated[int, whole(0, NODE_IDS_LAST)]
