"""What commands print with `--json`, against the schemas that `checkmate schema` prints."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from checkmate.cli.schema import schema_of


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(schema_of(name))


def check_document(name: str, document: Any) -> None:
    """Assert that a document is as the schema of that name describes it."""
    errors = [f"{error.json_path}: {error.message}" for error in _validator(name).iter_errors(document)]
    assert errors == []
