"""The committed output of p4c matches the sources, and has no paths of a machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from controlplane.entities import FEATURE_OF_TABLE
from p4src import artifacts, compile, table_sizes, tofino

PROGRAM = artifacts() / f"{compile.PROGRAM}.json"


@pytest.mark.parametrize("target", compile.TARGETS)
def test_the_committed_program_is_that_of_the_sources(target: str) -> None:
    if not compile.is_current(target):
        message = f"p4src has changed since it was compiled for {target}"
        if compile.find_compiler(target) is None:
            pytest.skip(f"{message}, and no compiler for it is here")
        pytest.fail(message)


def test_a_comment_is_no_change_of_a_program(tmp_path: Path) -> None:
    for name, text in (
        ("one.p4", '#define A 1\n@name("a // b") table t {\n    size = 1;\n}\n'),
        ("two.p4", '// of A\n#define A 1\n@name("a // b") table t { // t\n\n  size = /* one\n */ 1;\n}'),
        ("three.p4", '#define A 1\n@name("a // c") table t {\n    size = 1;\n}\n'),
    ):
        (tmp_path / name).write_text(text)
    first, two, three = (compile.code_of(tmp_path / name) for name in ("one.p4", "two.p4", "three.p4"))
    assert first == two != three


@pytest.mark.parametrize("target", compile.TARGETS)
def test_the_compilers_output_names_relative_paths_only(target: str) -> None:
    files = [file for file in artifacts(target).iterdir() if file.suffix == ".json"]
    assert files
    names = {
        text
        for file in files
        for text in _texts(json.loads(file.read_text()))
        if "/" in text and " " not in text
    }
    assert names or target in tofino.ARCHITECTURES
    assert not [name for name in names if name.startswith("/") or ".." in name]


def test_the_program_keeps_no_state_but_its_meters() -> None:
    program = json.loads(PROGRAM.read_text())
    assert program["register_arrays"] == []
    assert {meter["name"] for meter in program["meter_arrays"]} == {"client_rate", "stranger_rate"}


def test_the_control_plane_knows_every_table() -> None:
    assert set(table_sizes("bmv2")) == set(FEATURE_OF_TABLE)


def test_tables_have_the_sizes_that_jobs_may_need() -> None:
    sizes = table_sizes("bmv2")
    assert sizes["replication"] == sizes["streams"] == sizes["lost"] == 8192


@pytest.mark.skipif(shutil.which(compile.COMPILER) is None, reason="p4c-bm2-ss is not on PATH")
@pytest.mark.parametrize("target", ["bmv2", "tna"])
def test_p4c_makes_the_committed_program_again(target: str) -> None:
    """Except for the places in the sources, which a comment moves."""
    before = {file: file.read_bytes() for file in artifacts(target).iterdir()}
    assert compile.compile_program(target) == 0
    for file in artifacts(target).iterdir():
        again, committed = file.read_bytes(), before[file]
        if file.suffix == ".json":
            assert _without_places(json.loads(again)) == _without_places(json.loads(committed))
        else:
            assert again == committed


def _without_places(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_places(part) for key, part in value.items() if key != "source_info"}
    return [_without_places(part) for part in value] if isinstance(value, list) else value


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []
