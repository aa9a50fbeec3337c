"""The file of a running switch: valid and invalid files, and the suites with such a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.entities import MulticastGroup, TableEntry
from controlplane.forwarding import forward
from ptf_tests.__main__ import main
from ptf_tests.packets import PORTS
from ptf_tests.stage.config import ConfigError, read_config
from ptf_tests.stage.targets import TargetError
from ptf_tests.switch import _renumber_entity
from tests.support.job_files import edited

few = settings(max_examples=40)
ROOT = Path(__file__).resolve().parents[2]
RIGHT: dict[str, Any] = {
    "target": "tofino",
    "address": "192.168.0.100:9559",
    "cpu_port": 192,
    "ports": {port: {"port": 4 * port, "interface": f"eth{port}"} for port in PORTS},
}


def write(folder: Path, data: Any) -> Path:
    file = folder / "switch.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return file


def test_a_right_file_is_read(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, RIGHT))
    assert (config.device_id, config.p4runtime) == (1, "stratum")
    assert config.device_ports == {port: 4 * port for port in PORTS}


def test_the_example_in_the_documentation_is_right(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tofino.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    for number in range(3, 19):
        example += f"  {number}: {{port: {300 + number}, interface: eth{number}}}\n"
    assert read_config(write(tmp_path, example)).ports[2].interface == "eth2"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("target", "asic", "target: Input should be 'softswitch', 'bmv2', 'tofino' or 'tofino2'"),
        ("address", "nowhere", "address: Value error, must be host:port"),
        ("cpu_port", ..., "cpu_port: Field required"),
        ("ports.7", ..., "ports: 7 is missing; the suites use 1 to 18"),
        ("ports.19", {"port": 200, "interface": "eth19"}, "ports.19: the suites have no such port"),
        ("ports.3.interface", ..., "ports.3.interface: Field required"),
        ("ports.3.interface", "eth4", "ports.4.interface: eth4 is used 2 times"),
        ("ports.3.port", 16, "ports.3.port: 16 is used 2 times"),
        ("ports.3.port", 192, "ports.3.port: 192 is the CPU port"),
        ("ports.3.port", 512, "ports.3.port: Input should be less than 512"),
        ("colour", "red", "colour: Extra inputs are not permitted"),
    ],
)
def test_a_fault_is_said_with_its_place(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = write(tmp_path, edited(RIGHT, path, value))
    with pytest.raises(ConfigError) as error:
        read_config(file)
    assert f"{file}: {message}" in str(error.value)


@pytest.mark.parametrize("text", ["", "[", "- 1", "a: b: c"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"switch\.yaml"):
        read_config(write(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "nothing.yaml")


@given(st.permutations(list(PORTS)), st.frozensets(st.tuples(st.sampled_from(PORTS), st.integers(0, 3))))
@few
def test_ports_are_renumbered_and_back(device_ports: list[int], replicas: frozenset[tuple[int, int]]) -> None:
    there = {port: 128 + number for port, number in zip(PORTS, device_ports, strict=True)}
    back = {number: port for port, number in there.items()}
    for entity in (
        MulticastGroup(2, replicas),
        forward("02:00:00:00:00:01", PORTS[3]),
        TableEntry("stub", (), "punt"),
    ):
        assert _renumber_entity(_renumber_entity(entity, there), back) == entity
    assert _renumber_entity(forward("02:00:00:00:00:01", 5), there) == forward("02:00:00:00:00:01", there[5])


def test_a_tofino_needs_a_file_that_says_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--target", "tofino"]) == 2
        assert "PTF_CONFIG=FILE" in capsys.readouterr().err
        file = write(tmp_path, {**RIGHT, "target": "bmv2"})
        assert main(["--target", "tofino", "--config", str(file)]) == 2
        assert "is bmv2, but tofino was requested" in capsys.readouterr().err
        assert main(["--config", str(write(tmp_path, edited(RIGHT, "cpu_port", 4)))]) == 2
        assert capsys.readouterr().err.endswith("ports.1.port: 4 is the CPU port\n")
    finally:
        signal.signal(signal.SIGTERM, usual)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PTF imports
def test_an_interface_that_is_not_there_is_named() -> None:
    from ptf_tests.stage.standing import _usable  # noqa: PLC0415

    with pytest.raises(TargetError, match="no interface nosuch0"):
        _usable("nosuch0")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network namespace")


def run_by_file(folder: Path, *suites: str) -> list[dict[str, Any]]:
    options = [option for suite in suites for option in ("--suite", suite)]
    command = [sys.executable, "-m", "tests.scripts.standing_switch", str(folder), "--json", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode in (0, 1), result.stderr
    tests: list[dict[str, Any]] = json.loads(result.stdout)["tests"]
    wrong = [f"{test['test']}: {test['why']}" for test in tests if test["outcome"] == "failed"]
    assert not wrong, "\n\n".join(wrong)
    return tests


@needs_root
@pytest.mark.slow
def test_all_suites_run_by_a_file(tmp_path: Path) -> None:
    """A running embedded target has the port numbers of a Tofino.

    Only tests that need further switches are skipped.
    """
    tests = run_by_file(tmp_path)
    assert {test["suite"] for test in tests} == {"guard", "forwarding", "replication", "streams", "stub"}
    skipped = [test for test in tests if test["outcome"] == "skipped"]
    assert all("needs 3 switches" in test["why"] for test in skipped)
    assert len(skipped) < len(tests) / 10
