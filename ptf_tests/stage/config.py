"""The description of a running switch in a file: its P4Runtime server, ports, and their interfaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from checkmate.job.fields import HostPort
from checkmate.job.yaml_lines import JobError, read_document
from ptf_tests.packets import PORTS


class ConfigError(Exception):
    """An invalid file; the message has every fault, each with its location."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PortPlace(_Model):
    """A port of the switch, and the interface of this machine that is connected to it."""

    port: Annotated[int, Field(ge=0, lt=512, strict=True)]
    interface: Annotated[str, Field(min_length=1, max_length=15)]


class StandingConfig(_Model):
    """The switch under test. `ports` are by the suites' port numbers."""

    target: Literal["softswitch", "bmv2", "tofino", "tofino2"]
    address: HostPort
    device_id: Annotated[int, Field(ge=0, strict=True)] = 1
    p4runtime: Literal["stratum", "pi"] = "stratum"
    cpu_port: Annotated[int, Field(ge=0, lt=512, strict=True)]
    ports: Mapping[int, PortPlace]

    @property
    def device_ports(self) -> dict[int, int]:
        """The switch's port number for each of the suites'."""
        return {number: place.port for number, place in self.ports.items()}


def read_config(file: Path) -> StandingConfig:
    """Read a file; raise `ConfigError` with every fault in it."""
    try:
        data = read_document(file, "target: and ports:").data
    except JobError as error:
        raise ConfigError(str(error)) from None
    faults: list[str] = []
    try:
        config = StandingConfig.model_validate(data)
        faults += _faults(config)
    except ValidationError as error:
        faults += [f"{'.'.join(map(str, e['loc'])) or '(top level)'}: {e['msg']}" for e in error.errors()]
    if faults:
        raise ConfigError("\n".join(f"{file}: {fault}" for fault in faults))
    return config


def _faults(config: StandingConfig) -> Iterator[str]:
    for number in PORTS:
        if number not in config.ports:
            yield f"ports: {number} is missing; the suites use {PORTS[0]} to {PORTS[-1]}"
    for number in config.ports:
        if number not in PORTS:
            yield f"ports.{number}: the suites have no such port, only {PORTS[0]} to {PORTS[-1]}"
    yield from _twice("port", {n: place.port for n, place in config.ports.items()})
    yield from _twice("interface", {n: place.interface for n, place in config.ports.items()})
    for number, place in config.ports.items():
        if place.port == config.cpu_port:
            yield f"ports.{number}.port: {place.port} is the CPU port"


def _twice(field: str, values: Mapping[int, Any]) -> Iterator[str]:
    counts = Counter(values.values())
    for number, value in values.items():
        if counts[value] > 1:
            yield f"ports.{number}.{field}: {value} is used {counts[value]} times; each port needs its own"
