"""docs/install.md is complete: every environment variable that the code reads, every port, every extra."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.base.extras import LIBRARIES
from checkmate.ring.place import DEFAULT_PORT
from checkmate.wire.tag import CHANNELS_MAX
from topologies import torchrun
from topologies.describe.topology import P4RUNTIME_PORT, SHADOW_MGMT_PORT, STUB_TCP_PORT, load
from topologies.switches import THRIFT_PORT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text()
PACKAGES = (
    "checkmate",
    "controlplane",
    "examples",
    "p4src",
    "ptf_tests",
    "softswitch",
    "tools",
    "topologies",
)
_READS = ("os.environ.get", "os.environ.setdefault", "os.environ.pop", "os.getenv")


def first_cells(heading: str, table: int = 0) -> list[str]:
    """Return the first column of one of the tables of a chapter."""
    chapter = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"(?:^\|.*\n)+", chapter, re.MULTILINE)[table].splitlines()[2:]
    return [row.split("|")[1] for row in rows]


def variables_in(source: str) -> Iterator[str]:
    """Yield what the code names as a variable of the environment: a text in quotes, or a constant's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _READS:
            yield ast.unparse(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            yield ast.unparse(node.slice)
        elif isinstance(node, ast.Compare) and "os.environ" in map(ast.unparse, node.comparators):
            yield ast.unparse(node.left)


def read_by_the_code() -> set[str]:
    sources = [file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    constants: dict[str, str] = {}
    for source in sources:
        constants |= dict(re.findall(r"^([A-Z_]+)(?:: Final)? = \"([A-Z0-9_]+)\"$", source, re.MULTILINE))
    variables = {name for source in sources for name in variables_in(source)}
    shell = set(re.findall(r"\$\{(\w+):-", (ROOT / "tools" / "setup.sh").read_text()))
    nccl = (ROOT / "checkmate" / "nccl").glob("*.py")
    shell |= {name for file in nccl for name in re.findall(r'"(NCCL_\w+)"', file.read_text())}
    return shell | {name.strip("'") if "'" in name else constants[name] for name in variables}


def test_every_variable_that_the_code_reads_is_in_the_table() -> None:
    table = {name for cell in first_cells("Environment variables") for name in re.findall(r"`(\w+)`", cell)}
    assert read_by_the_code() == table


@pytest.mark.parametrize(
    ("line", "variables"),
    [
        ('x = os.environ.get("A", "")', ["'A'"]),
        ("x = os.environ[NAME]", ["NAME"]),
        ('x = os.getenv("B")', ["'B'"]),
        ('x = "C" in os.environ', ["'C'"]),
        ('x = {"D": 1}', []),
    ],
)
def test_a_variable_is_found_however_it_is_read(line: str, variables: list[str]) -> None:
    assert list(variables_in(line)) == variables


def test_what_labs_set_for_torch_is_in_the_table() -> None:
    cells = " ".join(first_cells("Environment variables", 1))
    assert {name for name in torchrun.ENVIRONMENT if not name.startswith("PYTHON")} <= set(cells.split("`"))


def test_every_port_is_in_the_table() -> None:
    cells = " ".join(first_cells("Ports"))
    ports = [torchrun.PORT, P4RUNTIME_PORT, THRIFT_PORT, SHADOW_MGMT_PORT, SHADOW_MGMT_PORT + 1]
    assert all(f" {port} " in cells for port in ports)
    assert f" {DEFAULT_PORT} to {DEFAULT_PORT + CHANNELS_MAX - 1}:" in cells
    assert f"labs have {STUB_TCP_PORT} for the stub" in PAGE


def test_every_extra_is_in_the_table() -> None:
    assert [cell.strip(" `") for cell in first_cells("Extras")] == ["none", *LIBRARIES]


def test_the_line_for_torchrun_is_that_of_labs() -> None:
    """It has the same options, except for what only hosts in namespaces need."""
    topology = load("single_tor")
    words = torchrun.command(topology, topology.trainers[0], ["train.py"])
    environment = (f"{name}=" for name in ("CHECKMATE_JOB", *torchrun.ENVIRONMENT))
    lab = " ".join([*environment, *map(str, words)])
    (line,) = re.findall(r"```sh\n(CHECKMATE_JOB=.*?)```", PAGE, re.DOTALL)
    lab_words, page_words = (set(re.findall(r"--[a-z-]+|[A-Z_]{6,}(?==)", text)) for text in (lab, line))
    assert lab_words - page_words == {"--rdzv-conf", "--monitor-interval"}
    assert page_words <= lab_words
