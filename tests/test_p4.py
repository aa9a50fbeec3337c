"""The committed output of p4c is that of the sources, and names no machine's paths."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from controlplane.codec import Codec
from controlplane.entities import FEATURE_OF_TABLE
from p4src import artifacts, compile

PROGRAM = artifacts() / f"{compile.PROGRAM}.json"


def test_the_committed_program_is_that_of_the_sources() -> None:
    assert compile.is_current(), "p4src has changed since it was compiled; run `make p4`"


def test_the_compilers_output_names_relative_paths_only() -> None:
    names = {
        part["filename"]
        for part in _dicts(json.loads(PROGRAM.read_text()))
        if isinstance(part.get("filename"), str)
    }
    assert names
    assert not [name for name in names if name.startswith("/") or ".." in name]


def test_the_program_keeps_no_state() -> None:
    program = json.loads(PROGRAM.read_text())
    assert program["register_arrays"] == []
    assert program["meter_arrays"] == []


def test_the_control_plane_knows_every_table() -> None:
    assert set(Codec.for_target("bmv2").table_sizes()) == set(FEATURE_OF_TABLE)


def test_tables_have_the_sizes_that_jobs_may_need() -> None:
    sizes = Codec.for_target("bmv2").table_sizes()
    assert sizes["replication"] == 256 * 16 * 8
    assert sizes["streams"] == sizes["lost"] == 8192


@pytest.mark.skipif(shutil.which(compile.COMPILER) is None, reason="p4c-bm2-ss is not on PATH")
def test_p4c_makes_the_committed_program_again() -> None:
    before = PROGRAM.read_text()
    assert compile.compile_program() == 0
    assert PROGRAM.read_text() == before


def _dicts(value: object) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *[found for part in value.values() for found in _dicts(part)]]
    if isinstance(value, list):
        return [found for part in value for found in _dicts(part)]
    return []
