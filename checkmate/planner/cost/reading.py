"""Reading the inputs of `checkmate cost`: YAML, overridden by options; faults have a location."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from checkmate.job.faults import Fault
from checkmate.job.validation import validated
from checkmate.job.yaml_lines import Document, JobError, Located, read_document
from checkmate.planner import units
from checkmate.planner.cost.inputs import CostInputs

COMMAND_LINE: Final = Path("command line")
_INSTEAD: Final[Mapping[str, tuple[str, ...]]] = {
    "iteration": ("model",),
    "stall": ("parameters", "storage"),
}
"""Values that may be specified instead of another, all together."""


_EMPTY: Final = "has no value; add one, or remove the key"


class InputError(JobError):
    """Invalid values; `faults` has all reasons."""

    where = "the values"


def read_inputs(file: Path | None, flags: Mapping[str, str]) -> CostInputs:
    """Read inputs from YAML, overridden by options. Raise `InputError` with all faults."""
    try:
        document = read_document(file, "gpus: and stall:") if file else None
    except JobError as error:
        raise InputError(error.faults) from None
    values: dict[str, Any] = {**(document.data if document else {}), **flags}
    for key, instead in _INSTEAD.items():
        if key in flags:  # overrides the file
            values = {name: value for name, value in values.items() if name not in instead or name in flags}
        elif any(name in flags for name in instead):
            values.pop(key, None)
    faults = [
        *_alternatives(values),
        *(Fault((key,), _EMPTY) for key, value in values.items() if value is None),
    ]
    values = {key: value for key, value in values.items() if value is not None}
    inputs, structural = validated(CostInputs, values)
    faults += structural
    if inputs and not faults:
        faults = list(_between(inputs, values))
    if faults or not inputs:
        raise InputError([_located(fault, document, flags) for fault in faults])
    return inputs


def _alternatives(values: Mapping[str, Any]) -> Iterator[Fault]:
    for key, instead in _INSTEAD.items():
        alternatives = [name for name in instead if name in values]
        if alternatives and key in values:
            yield Fault((alternatives[0],), f"cannot be combined with {key}, which it replaces; remove one")
        for name in instead:
            if alternatives and name not in values:
                yield Fault((alternatives[0],), f"needs {name} as well, to replace {key}")


def _between(inputs: CostInputs, values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield faults between values that are each valid."""

    def fault(message: str, *keys: str) -> Fault:
        return Fault((next((key for key in keys if key in values), keys[0]),), message)

    model = inputs.model
    if model and (model.hidden % model.heads or model.heads % model.kv_heads):
        yield Fault(("model", "heads"), "must divide hidden, and be a multiple of kv_heads")
        return
    iteration = units.show_seconds(inputs.iteration_s)
    longest = units.show_seconds(inputs.duration)
    if inputs.iteration_s > inputs.duration:
        text = f"an iteration ({iteration}) takes longer than the training ({longest})"
        yield fault(text, "iteration", "model", "duration")
    elif (inputs.every_iterations or 1) * inputs.iteration_s > inputs.duration:
        text = f"the training ({longest}) would be over before the first checkpoint"
        yield fault(text, "every", "duration")
    if inputs.replicas > inputs.node_count:
        text = f"{inputs.replicas} holders of a shard need as many shadow nodes, not {inputs.node_count}"
        yield fault(text, "replicas", "shadow_nodes")
    if inputs.group_count > inputs.gpus:
        text = f"{inputs.group_count:,} DP groups need as many GPUs, not {inputs.gpus:,}"
        yield fault(text, "dp_groups", "gpus")


def _located(fault: Fault, document: Document | None, flags: Mapping[str, str]) -> Located:
    """Return a fault with its location: the option, or the file."""
    key = str(fault.path[0])
    if key in flags or document is None:
        return Located(COMMAND_LINE, 0, f"--{key.replace('_', '-')}", fault.message)
    return document.locate(fault)
