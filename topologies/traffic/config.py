"""The JSON configuration of `rank_main` and `sink_main`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ModelT = TypeVar("ModelT", bound=BaseModel)
Whole = Annotated[int, Field(ge=0)]


class StrictModel(BaseModel):
    """Base of models that reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_config(file: str, model: type[ModelT]) -> ModelT | None:
    """Return the configuration in a file; print its faults and return `None` if it has some."""
    try:
        return model.model_validate_json(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        print(f"{file}: {error}", file=sys.stderr)
    except ValidationError as error:
        for fault in error.errors():
            path = ".".join(str(part) for part in fault["loc"])
            print(f"{file}: {path + ': ' if path else ''}{fault['msg']}", file=sys.stderr)
    return None
