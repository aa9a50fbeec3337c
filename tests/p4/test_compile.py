"""Compilation for a Tofino: committed files change only after complete success, and wrong input is reported.

The real compiler runs if it is installed. A script emulates compilers in states that the real one does not
reach.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from controlplane.tofino.device_config import NotCompiled, check_cpu_port, pack, read_program
from p4src import ROOT, artifacts, compile, tofino

SELECTS = "".join(f"      {value}:\n" for value in ("0x0800", "0x0101080a", "0xfd10c4ec"))


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace p4src/build by a folder with the files of an earlier compilation, beside an SDE."""
    folder = tmp_path / "build"
    folder.mkdir()
    for name in (tofino.P4INFO, tofino.SCHEMA):
        (folder / name).write_text("earlier")
    monkeypatch.setattr(tofino, "artifacts", lambda _: folder)
    monkeypatch.setattr(compile, "artifacts", lambda _: folder)
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path / "sde"))
    return folder


def ends_as(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, files: Mapping[str, str]) -> None:
    """Install a compiler that writes these files to its output folder, and ends."""
    script = f"""\
#!{sys.executable}
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
(folder / "pipe").mkdir(exist_ok=True)
for name, text in {dict(files)!r}.items():
    (folder / name).write_text(text)
sys.exit({status})
"""
    program = folder / "compiler"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("P4C_TOFINO", str(program))


OUTPUT_FILES = {
    "p4info.txt": "p4info",
    "bf-rt.json": "{}",
    "pipe/tofino.bin": "binary",
    "pipe/context.json": "{}",
    "pipe/checkmate_tna.bfa": SELECTS,
}


def test_what_is_compiled_can_be_loaded(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_as(tmp_path, monkeypatch, 0, OUTPUT_FILES)
    assert tofino.compile_program("tofino", 320) == 0
    assert (committed / tofino.P4INFO).read_text() == "p4info"
    assert (committed / tofino.SCHEMA).read_text() == "{}"
    program = read_program("tofino", tmp_path / "sde")
    assert (program.name, program.cpu_port) == ("checkmate_tna", 320)
    assert [pipeline.binary for pipeline in program.pipelines] == [b"binary"]
    assert pack(program, "stratum") and pack(program, "pi")
    check_cpu_port(program, "tofino", 320)
    with pytest.raises(NotCompiled, match=r"compiled for CPU port 320.*--cpu-port 192"):
        check_cpu_port(program, "tofino", 192)


@pytest.mark.parametrize(
    ("status", "files", "why"),
    [
        (1, {"p4info.txt": "new"}, ""),
        (0, {name: "new" for name in OUTPUT_FILES if name != "pipe/tofino.bin"}, "has not written"),
        (
            0,
            OUTPUT_FILES | {"pipe/checkmate_tna.bfa": SELECTS.replace("0xfd10c4ec", "*")},
            "select 0xfd10c4ec",
        ),
    ],
)
def test_a_compilation_that_fails_changes_nothing_committed(
    committed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    files: dict[str, str],
    why: str,
) -> None:
    ends_as(tmp_path, monkeypatch, status, files)
    assert tofino.compile_program("tofino") == 1
    assert why in capsys.readouterr().err
    assert {file.read_text() for file in committed.iterdir()} == {"earlier"}
    assert not tofino.configuration("tofino").exists()


def test_output_that_is_missing_is_not_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in compile.TARGETS:
        usual = artifacts(target)
        folder = tmp_path / target
        shutil.copytree(usual, folder)
        with monkeypatch.context() as patch:
            patch.setattr(compile, "artifacts", lambda _, folder=folder: folder)
            compile.write_digest(target)
            assert compile.is_current(target)
            for name in compile.outputs(target):
                (folder / name).unlink()
                assert not compile.is_current(target), name
                shutil.copy(usual / name, folder)


@pytest.mark.parametrize("place", ["My SDE", "taken"])
def test_an_sde_where_nothing_can_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    ends_as(tmp_path, monkeypatch, 0, OUTPUT_FILES)
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "My").mkdir()  # would be deleted because of an unquoted path
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path / place))
    assert tofino.compile_program("tofino") == 2
    assert str(tmp_path / place) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["tofino"], {"P4C_TOFINO": "./nowhere"}, "P4C_TOFINO=./nowhere: not found"),
        (["tofino"], {"PATH": ""}, "neither bf-p4c nor p4c"),
        (["bmv2"], {"P4C": "./nowhere"}, "./nowhere is not found"),
        (["bmv2"], {"PATH": ""}, "p4c-bm2-ss is not on PATH"),
        (["bmv2", "--cpu-port", "5"], {}, "--cpu-port is for a Tofino"),
        (["tofino", "--cpu-port", "5000"], {}, "a device port is a number from 0 to 511"),
    ],
)
def test_what_cannot_be_compiled_is_told(
    arguments: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "p4src.compile", *arguments],
        env={"PATH": "", "SDE_INSTALL": str(tmp_path), **environment},
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(tofino.ARCHITECTURES))
def test_the_compiler_makes_what_is_committed_again(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path))
    if tofino.driver(target) is None:
        pytest.skip(f"no p4c with a backend for {target} on PATH")
    monkeypatch.setattr(tofino, "artifacts", lambda _: tmp_path / "build")
    assert tofino.compile_program(target) == 0
    build, usual = tmp_path / "build", artifacts(target)
    assert (build / tofino.P4INFO).read_bytes() == (usual / tofino.P4INFO).read_bytes()
    assert tables(build / tofino.SCHEMA) == tables(usual / tofino.SCHEMA)


def tables(schema: Path) -> dict[str, object]:
    """Return the program's own tables; the debugger's snapshots have different numbers in each run."""
    by_name = {table["name"]: table for table in json.loads(schema.read_text())["tables"]}
    return {name: table for name, table in by_name.items() if ".snapshot." not in name}
