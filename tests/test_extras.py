"""Each role's extra is enough for what the role does, and a missing one is named in one way everywhere."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name

from checkmate.base.extras import LIBRARIES
from testbed.jobs import job_data
from tests.support import environments
from tests.support.environments import PROJECT, ROOT, required

pytestmark = pytest.mark.xdist_group("extras")  # an environment is made once

CLI = ("-m", "checkmate.cli.entry")
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes an environment with the libraries of an extra; "" is the core."""
    environments_by_extra: dict[str, Path] = {}

    def make(extra: str) -> Path:
        if extra not in environments_by_extra:
            environments_by_extra[extra] = tmp_path_factory.mktemp(extra or "core")
            environments.make(environments_by_extra[extra], [extra] if extra else [])
        return environments_by_extra[extra]

    return make


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data()))
    nodes = [{"id": 0, "mgmt": "127.0.0.1:1"}]
    by_hosts = {"job": "mine", "copies": "host", "ranks": 2, "shadow_nodes": nodes}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(by_hosts))
    return file


def test_the_extras_are_those_of_the_project() -> None:
    """Each brings exactly the modules that the message knows."""
    owners = metadata.packages_distributions()
    libraries = set().union(*LIBRARIES.values())
    extras = PROJECT.extras.keys() - {"test", "docs"}
    assert extras == LIBRARIES.keys()
    for extra, modules in LIBRARIES.items():
        brought = required([extra])
        assert {
            library for library in libraries if set(map(canonicalize_name, owners[library])) & brought
        } == modules


def test_the_core_is_light() -> None:
    assert not required() & {"torch", "grpcio", "numpy", "matplotlib", "finsy", "pyroute2"}
    for extra in ("switch", "plan"):
        assert "torch" not in required([extra])


@pytest.mark.parametrize(
    "command",
    [
        "validate JOB",
        "keys JOB",
        "plan JOB",
        "plan JOB --json",
        "sysctl JOB --role shadow",
        "--help",
        "shadow --help",
    ],
)
def test_the_core_checks_jobs_makes_keys_and_plans(environment: Make, job_file: Path, command: str) -> None:
    result = _run(environment(""), job_file, command)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("command", ["doctor --json", "doctor JOB --role shadow --id 0 --json"])
def test_the_doctor_needs_the_core_to_tell_what_is_missing(
    environment: Make, job_file: Path, command: str
) -> None:
    result = _run(environment(""), job_file, command)
    assert (result.returncode, result.stderr) == (9, "")
    for role in json.loads(result.stdout)["roles"]:
        (libraries,) = [finding for finding in role["findings"] if finding["check"] == "libraries"]
        assert libraries["outcome"] == "failed"
        assert libraries["remedy"].startswith("pip install 'checkmate-training[")


SECOND_CASES = (
    ("", "status JOB --wait", "switch"),
    ("", "status mine.yaml", "trainer"),
    ("trainer", "remove JOB", "switch"),
    ("trainer", "shadow JOB --id 0 --insecure", "shadow"),
    ("shadow", "profile --plot x.png", "plan"),
    ("plan", "plan JOB --capacity --model GPT3-XL", "shadow"),
    ("switch", "cost --plot x.png", "plan"),
    ("shadow", "lab up single_tor", "demo"),
    ("", "topologies.training.demo", "demo"),
    ("switch", "checkmate.restore", "trainer"),
)
"""Of commands that others stand for."""


@pytest.mark.parametrize(
    ("extra", "command", "missing"),
    [
        ("", "run JOB", "switch"),
        ("switch", "shadow JOB --id 0 --insecure", "shadow"),
        ("", "consolidate JOB --out new --insecure", "shadow"),
        ("plan", "profile", "shadow"),
        ("", "cost", "plan"),
        ("", "lab up single_tor", "demo"),
        ("", "softswitch", "switch"),
        ("", "checkmate.protect", "trainer"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SECOND_CASES),
    ],
)
def test_a_missing_extra_is_named(
    environment: Make, job_file: Path, extra: str, command: str, missing: str
) -> None:
    result = _run(environment(extra), job_file, command)
    subject, last = command.split(maxsplit=1)[0], result.stderr.splitlines()[-1]
    match = re.fullmatch(
        r"(?:error|checkmate\.base\.extras\.ExtraMissing): (.*) needs (\w+), which is not (.*)", last
    )
    assert match, result.stderr
    assert match[2] in LIBRARIES[missing] - LIBRARIES.get(extra, frozenset())
    assert match[3] == f"installed; install it with: pip install 'checkmate-training[{missing}]'"
    if "." in subject:
        assert match[1] in (subject, "a lab")
    else:
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
        assert "--plot" in command or subject in match[1] or match[1] == "a lab"


def test_a_missing_extra_is_in_the_json(environment: Make, job_file: Path) -> None:
    error = json.loads(_run(environment(""), job_file, "status JOB --json").stdout)
    assert error["exit"] == 2
    assert "checkmate-training[switch]" in error["error"]


@pytest.mark.parametrize(
    ("extra", "command", "status", "words"),
    [
        ("plan", "cost --runs 10 --plot x.png", 0, "figures: x.png"),
        ("switch", "status JOB", 3, "127.0.0.1:9559"),
        ("trainer", "status mine.yaml", 3, "shadow node 0 (127.0.0.1:1): can't be reached"),
        ("switch", "softswitch --help", 0, "--grpc-server-addr"),
        ("shadow", "plan JOB --capacity --model GPT3-XL", 0, "GPT3-XL"),
        ("shadow", "profile --model ResNet50 --seconds 0.1 --threads 1 --memory 1GB", 0, "ResNet50"),
        ("shadow", "shadow JOB --id 7 --insecure", 2, "no shadow node 7"),
        ("shadow", "consolidate JOB --out new --insecure --timeout 1", 3, "shadow node 0"),
    ],
)
@pytest.mark.slow
def test_an_extra_is_enough_for_its_role(
    environment: Make, job_file: Path, extra: str, command: str, status: int, words: str
) -> None:
    result = _run(environment(extra), job_file, command)
    assert result.returncode == status, result.stdout + result.stderr
    assert words in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("trainer", ["checkmate/training", "checkmate/ring", "checkmate/tagger", "checkmate/consolidate"]),
        pytest.param(
            "shadow", ["checkmate/shadow", "checkmate/consolidate", "checkmate/nodes"], marks=pytest.mark.slow
        ),
        ("switch", ["controlplane", "softswitch", "p4src"]),
        ("demo", ["topologies", "checkmate/examples/gpt"]),
    ],
)
def test_an_extra_has_all_that_its_modules_import(environment: Make, extra: str, packages: list[str]) -> None:
    sources = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    files = [file for file in sources if file.stem != "metrics"]  # --metrics has an extra of its own
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    code = f"import importlib; [importlib.import_module(name) for name in {names}]"
    result = environments.run(environment(extra), "-c", code)
    assert result.returncode == 0, result.stderr


def _run(environment: Path, job_file: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `checkmate`, `softswitch`, or the use of a name of the module `checkmate`."""
    words = [str(job_file) if word == "JOB" else word for word in command.split()]
    if words[0] in ("softswitch", "topologies.training.demo"):
        return environments.run(environment, "-m", *words)
    if words[0].startswith("checkmate."):
        return environments.run(environment, "-c", f"import checkmate; {words[0]}")
    return environments.run(environment, *CLI, *words, folder=job_file.parent)
