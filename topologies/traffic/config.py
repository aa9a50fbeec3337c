"""The JSON configuration of `rank_main` and `sink_main`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_config(name: str, model: type[ModelT]) -> ModelT | None:
    """Return the configuration in file `name` ("-": standard input); print its faults and return `None`."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
        return model.model_validate_json(text)
    except (OSError, UnicodeDecodeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except ValidationError as error:
        for fault in error.errors():
            path = ".".join(str(part) for part in fault["loc"])
            print(f"{name}: {path + ': ' if path else ''}{fault['msg']}", file=sys.stderr)
    return None
