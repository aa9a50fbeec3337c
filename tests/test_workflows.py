"""Workflows run what there is, with actions that nobody can exchange, and may only read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: str(file.name))
def test_a_workflow_reads_only_and_ends(workflow: Path) -> None:
    read = yaml.safe_load(workflow.read_text())
    assert read["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 240 and "permissions" not in job for job in read["jobs"].values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: str(file.name))
def test_actions_are_pinned_by_the_hash_of_a_commit(workflow: Path) -> None:
    lines = re.findall(r"uses: (.*)", workflow.read_text())
    assert lines
    for line in lines:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v[0-9.]+", line), line
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: str(file.name))
def test_a_workflow_makes_targets_that_there_are(workflow: Path) -> None:
    targets = {
        name for step in steps(workflow) for name in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
    }
    assert targets and targets <= TARGETS


def test_every_supported_version_of_python_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
