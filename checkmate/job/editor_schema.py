"""JSON Schemas of YAML files, with which editors complete keys and mark faults. Pure.

They describe files as users write them: a fabric may be the path of a file, a port its front-panel name.
Rules between the parts of a file are left to `checkmate validate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from checkmate.job.fabric_file import FabricFile
from checkmate.job.host_copies import HostCopiesFile
from checkmate.job.placing import OF_HOST
from checkmate.job.schema import Attachment, Host, Job, Nic, Rank, Switch
from checkmate.job.tofino import chips
from checkmate.job.validation import adapter

_PORT_NAME: Final = {"type": "string", "pattern": chips.PORT_NAME}


class Generator(GenerateJsonSchema):
    """A generator that does not repeat each key as its title."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return `False`."""
        return False


def of_model(model: type) -> dict[str, Any]:
    """Return the JSON Schema of files that a model describes completely."""
    return {"$schema": Generator.schema_dialect, **adapter(model).json_schema(schema_generator=Generator)}


def of_job() -> dict[str, Any]:
    """Return the JSON Schema of job files."""
    schema = _with_ports(of_model(Job))
    rank = schema["$defs"][Rank.__name__]
    own_keys = [name for name in rank.pop("required") if name != "rank"]
    rank["required"] = ["rank"]
    rank["oneOf"] = [
        {"required": ["host"], **_without(OF_HOST)},
        {"required": own_keys, **_without(("host",))},
    ]
    path = {"type": "string", "minLength": 1, "description": "The path of a fabric file."}
    schema["required"].remove("dp_groups")
    schema["oneOf"] = [{"required": ["dp_groups"]}, {"required": ["mesh", "hosts", "gpus_per_host"]}]
    schema["properties"]["fabric"] = {"anyOf": [schema["properties"]["fabric"], path]}
    return of_both_ways(schema, of_model(HostCopiesFile))


def of_both_ways(schema: dict[str, Any], by_hosts: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of files whose copies are by switches, or by hosts."""
    by_switches = {key: value for key, value in schema.items() if key not in ("$schema", "$defs")}
    is_host = {"properties": {"copies": {"const": "host"}}, "required": ["copies"]}
    return {
        "$schema": schema["$schema"],
        "$defs": {**schema["$defs"], **by_hosts.pop("$defs", {})},
        "if": is_host,
        "then": {key: value for key, value in by_hosts.items() if key != "$schema"},
        "else": by_switches,
    }


def of_fabric() -> dict[str, Any]:
    """Return the JSON Schema of fabric files."""
    return _with_ports(of_model(FabricFile))


def _without(names: Iterable[str]) -> dict[str, Any]:
    return {"properties": dict.fromkeys(names, False)}


def _with_ports(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with front-panel names of ports, which `tofino.ports` resolves, beside numbers."""
    defined = schema["$defs"]
    for model in (Attachment, Host, Nic, Rank):
        if (definition := defined.get(model.__name__)) is not None:
            definition["properties"]["port"] = {"anyOf": [definition["properties"]["port"], _PORT_NAME]}
    number = {"type": "integer", "minimum": 0}
    ports = defined[Switch.__name__]["properties"]["ports"]
    ports["patternProperties"] = {
        name: {"anyOf": [settings, number]} for name, settings in ports["patternProperties"].items()
    }
    ports["additionalProperties"] = False
    return schema
