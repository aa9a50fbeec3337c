"""Help texts, suggestions for what was mistyped, and completion by the shells."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from checkmate.cli import main
from checkmate.cli.completing import job_paths
from tests.support.cli import COMMAND, invoke

LAB = ("up", "down", "run", "list", "exec", "logs", "train")
NCCL = ("build", "check")
COMMANDS = [
    *(name for name in main.COMMANDS if name not in ("lab", "nccl")),
    *(f"lab {name}" for name in LAB),
    *(f"nccl {name}" for name in NCCL),
]
CHECKMATE = f"""#!{COMMAND[0]}
from checkmate.cli.entry import main
main()
"""
COMPLETED = """
source script
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_checkmate_completion checkmate
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, output = invoke(*command.split(), "--help")
    assert code == 0
    example = " ".join(output.partition("Example: ")[2].split())
    assert f"checkmate {command}" in example
    assert not re.search(r"<(int|float|str|path|list)|\{", output), "types instead of names"


@pytest.mark.parametrize("group", ["", "lab", "nccl"])
def test_lists_of_commands_have_whole_summaries(group: str) -> None:
    summaries = " ".join(invoke(*group.split(), "--help")[1].partition("Options:")[2].split())
    for command in COMMANDS:
        if command.partition(" ")[0] == group or not (group or " " in command):
            summary, *_ = " ".join(invoke(*command.split(), "--help")[1].split("\n\n")[1].split()).split(". ")
            assert f" {command.split()[-1]} {summary}" in f" {summaries}"


def test_commands_are_in_groups_that_say_what_they_are_for() -> None:
    output = invoke("--help")[1]
    titles = [output.index(f"\n{title}:\n") for title in main.GROUPS]
    assert titles == sorted(titles)
    for title, commands in main.GROUPS.items():
        section = output.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines() if line[2] != " "] == list(commands)


def test_arguments_are_called_the_same_everywhere() -> None:
    for command in ("validate", "plan", "run", "status", "remove"):
        output = invoke(command, "--help")[1]
        assert f" {command} [OPTIONS] JOB...\n" in output
        assert "\n  JOB...  Job files, or folders of them." in output
    assert "[OPTIONS] [LAB...]" in invoke("lab", "down", "--help")[1]
    assert "[OPTIONS] JOB\n" in invoke("shadow", "--help")[1]


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("valdate job.yaml", "validate"),
        ("consolodate job.yaml", "consolidate"),
        ("lab rnu single_tor", "run"),
        ("validate --jsn job.yaml", "--json"),
        ("plan --capcity job.yaml", "--capacity"),
    ],
)
def test_what_was_mistyped_is_suggested(line: str, suggestion: str) -> None:
    code, output = invoke(*line.split())
    assert (code, suggestion in output.partition("No such")[2]) == (2, True), output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with job files, a `checkmate` command, and bash's script of completion."""
    (tmp_path / "checkmate").write_text(CHECKMATE)
    (tmp_path / "checkmate").chmod(0o755)
    (tmp_path / "jobs").mkdir()
    for name in ("one.yaml", "jobs/gpt.yaml", "jobs/llama.yml", "notes.txt", ".hidden.yaml", "a b.yaml"):
        (tmp_path / name).touch()
    return tmp_path


def shell(folder: Path, *command: str, **more: str) -> str:
    environment = {**os.environ, **more, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return result.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sha"], ["shadow"]),
        (["validate", ""], ["jobs/", "one.yaml"]),
        pytest.param(["validate", "j"], ["jobs/", "jobs/gpt.yaml", "jobs/llama.yml"], marks=pytest.mark.slow),
        pytest.param(["shadow", "jobs/l"], ["jobs/llama.yml"], marks=pytest.mark.slow),
        pytest.param(["plan", "--pf"], ["--pfc"], marks=pytest.mark.slow),
        pytest.param(["doctor", "--role", ""], ["trainer", "shadow", "controller"], marks=pytest.mark.slow),
        pytest.param(["docs", "tutorial/1"], ["tutorial/1-laptop"], marks=pytest.mark.slow),
        pytest.param(["lab", "up", "two"], ["two_hosts", "two_stages", "two_tor"], marks=pytest.mark.slow),
        (["lab", "run", "single_tor", "--target", ""], ["softswitch", "bmv2", "tofino"]),
        (["validate", "a"], [""]),  # bash completes this name itself, and quotes it
    ],
)
def test_bash_completes(folder: Path, words: list[str], offered: list[str]) -> None:
    completion_command = (
        "checkmate --show-completion; true"  # a further command, so that bash stays and is found
    )
    (folder / "script").write_text(shell(folder, "bash", "-c", completion_command))
    completions = shell(folder, "bash", "--norc", "-c", COMPLETED, "bash", "checkmate", *words)
    assert completions.splitlines() == offered


def test_zsh_and_fish_complete(folder: Path) -> None:
    """As their scripts ask for it; `checkmate` is a command of this folder."""
    line = {"_TYPER_COMPLETE_ARGS": "checkmate validate jobs/"}
    completions = shell(folder, "checkmate", _CHECKMATE_COMPLETE="complete_zsh", **line)
    assert '"jobs/gpt.yaml"\n"jobs/llama.yml"' in completions
    fish = {"_CHECKMATE_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert shell(folder, "checkmate", **fish, **line).splitlines() == ["jobs/gpt.yaml", "jobs/llama.yml"]


def test_a_folder_that_cannot_be_listed_has_no_completions(folder: Path) -> None:
    assert job_paths(f"{folder}/nowhere/") == []
    assert job_paths(f"{folder}/notes.txt/") == []
