"""`checkmate schema`: print the JSON Schema of a kind of file, or of what `--json` prints."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from checkmate.base.wording import did_you_mean
from checkmate.cli.common import UsageFault, show_errors
from checkmate.job import editor_schema

FILES: Final = ("job", "fabric", "lab")
DOCUMENTS: Final = {
    "error": "base:ErrorDocument",
    "validate": "base:ValidateDocument",
    "keys": "base:KeysDocument",
    "doctor": "base:DoctorDocument",
    "plan": "switches:PlanDocument",
    "plan-capacity": "planner:CapacityDocument",
    "plan-capacity-host": "planner:HostCapacityDocument",
    "plan-pfc": "switches:PfcDocument",
    "plan-bfrt": "switches:BfrtDocument",
    "sysctl": "base:SysctlDocument",
    "status": "switches:StatusDocument",
    "report": "nodes:ReportDocument",
    "remove": "switches:RemoveDocument",
    "shadow": "nodes:ShadowLine",
    "consolidate": "nodes:ConsolidateDocument",
    "reset": "nodes:ResetDocument",
    "drain": "nodes:DrainDocument",
    "cost": "planner:CostDocument",
    "profile": "planner:ProfileDocument",
    "lab-list": "base:LabListDocument",
    "lab-run": "switches:LabRunDocument",
}
"""The model of each document. They load on demand, because some need the switch commands' libraries."""

_LAB_FILES: Final = ("topologies.describe.lab_file", "topologies.describe.host_copies")


def names() -> list[str]:
    """Return the names of all schemas."""
    return [*FILES, *DOCUMENTS]


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of that name."""
    match name:
        case "job":
            return editor_schema.of_job()
        case "fabric":
            return editor_schema.of_fabric()
        case "lab":
            switches, bridge = map(import_module, _LAB_FILES)
            both = editor_schema.of_model(switches.LabFile), editor_schema.of_model(bridge.BridgeLabFile)
            return editor_schema.of_both_ways(*both)
        case _:
            module, _, kind = f"checkmate.cli.documents.{DOCUMENTS[name]}".partition(":")
    return editor_schema.of_model(getattr(import_module(module), kind))


@show_errors
def schema(
    name: Annotated[
        str, typer.Argument(help="job, fabric, lab, error, or a command with --json.", autocompletion=names)
    ],
) -> None:
    """Print the JSON Schema of files, for editors, or of what a command prints with --json.

    `checkmate init` writes that of job files beside a new job file. Variants of commands have names of their
    own: plan-capacity, plan-capacity-host, plan-pfc, plan-bfrt, lab-list, lab-run.

    Example: checkmate schema job > job.schema.json
    """
    if name not in names():
        raise UsageFault(f"no schema {name!r}{did_you_mean(name, names())}; there are {', '.join(names())}")
    typer.echo(json.dumps(schema_of(name), indent=2))
