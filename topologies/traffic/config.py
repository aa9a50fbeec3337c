"""The JSON configuration of `rank` and `sink`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from topologies.describe.topology import BadDescription

ModelT = TypeVar("ModelT", bound=BaseModel)
Whole = Annotated[int, Field(ge=0)]


class StrictModel(BaseModel):
    """Base of models that reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_config(file: Path, model: type[ModelT]) -> ModelT:
    """Return the configuration in a file. Raise `BadDescription` with all its faults."""
    try:
        return model.model_validate_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadDescription(f"{file}: {error}") from None
    except ValidationError as error:
        paths = [".".join(str(part) for part in fault["loc"]) for fault in error.errors()]
        faults = zip(paths, error.errors(), strict=True)
        lines = (f"{file}: {path + ': ' if path else ''}{fault['msg']}" for path, fault in faults)
        raise BadDescription("\n".join(lines)) from None
