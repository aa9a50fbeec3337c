"""A Tofino's model as a lab's switch: files, command lines and errors, with scripts for model and drivers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkmate.job.files import read_jobs
from p4src.tofino import CPU_PORT_NOTE
from testbed.ports import free_port
from tests.support.controlplane.tofino import write_compiled
from tests.support.labs.live import alive
from tests.support.waiting import wait_until
from topologies import switches, tofino_model
from topologies.describe import job_files
from topologies.describe.topology import LabError, load
from topologies.kernel.processes import descendants

SLEEPS = "exec sleep 600"
LISTENS = """exec python3 -c '
import socket, time
servers = [socket.create_server(("127.0.0.1", port)) for port in ({ports})]
time.sleep(600)'"""


@pytest.fixture
def sde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An SDE's installation on PATH, with a program that is compiled for the model."""
    folder = tmp_path / "sde"
    script(folder, tofino_model.MODEL, SLEEPS)
    script(folder, tofino_model.DRIVERS, SLEEPS)
    (folder / "share" / "bf_rt_shared").mkdir(parents=True)
    conf = write_compiled(folder, "tofino", b"binary", b"{}")
    noted = folder / json.loads(conf.read_text())["p4_devices"][0]["p4_programs"][0]["bfrt-config"]
    noted.with_name(CPU_PORT_NOTE).write_text("320\n")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SDE_INSTALL", str(folder))
    return folder


def script(sde: Path, name: str, text: str) -> None:
    file = sde / "bin" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_its_files_and_commands(tmp_path: Path) -> None:
    switch = load("single_tor").switches[0]
    command = switches.command(switch, "tofino", tmp_path)
    assert command[1:4] == ["-P", "-m", "topologies.tofino_model"]
    assert command[4:] == ["--folder", f"{tmp_path}/tor", "--ports", "8", "--address", "172.31.3.1:9559"]
    assert tofino_model.ports_file(2) == {
        "PortToIf": [{"device_port": 1, "if": "port1"}, {"device_port": 2, "if": "port2"}]
    }
    assert tofino_model.model_command(tmp_path)[:5] == [
        "tofino-model",
        "-d",
        "1",
        "-f",
        f"{tmp_path}/ports.json",
    ]
    drivers = tofino_model.drivers_command(Path("/sde"), tmp_path, "172.31.3.1:9559")
    assert drivers[:5] == ["bf_switchd", "--install-dir", "/sde", "--conf-file", f"{tmp_path}/switch.conf"]
    assert drivers[-2:] == ["--p4rt-server", "172.31.3.1:9559"]
    assert "--skip-p4" in drivers
    (device,) = tofino_model.configuration()["p4_devices"]
    assert (device["device-id"], device["p4_programs"]) == (0, [])


def test_its_job_is_valid_and_names_the_models_server(tmp_path: Path) -> None:
    for name, text in job_files.files(load("two_tor"), "lab", "tofino").items():
        (tmp_path / name).write_text(text)
    (job,) = read_jobs([tmp_path / job_files.JOB_FILE])
    for switch in job.fabric.switches:
        assert (switch.target, switch.p4runtime, switch.device_id) == ("tofino", "pi", 0)
        assert (switch.packet_port, switch.speed) == (320, "10G")


def test_a_complete_installation_is_accepted(sde: Path) -> None:
    switches.check_target("tofino", load("two_tor").switches)
    assert tofino_model.installation() == sde


def without_tools(sde: Path, patch: pytest.MonkeyPatch) -> None:
    for name in (tofino_model.MODEL, tofino_model.DRIVERS):
        (sde / "bin" / name).unlink()
    patch.setenv("PATH", str(sde / "bin"))


def without_model(sde: Path, patch: pytest.MonkeyPatch) -> None:
    (sde / "bin" / tofino_model.MODEL).unlink()
    patch.setenv("PATH", str(sde / "bin"))


def without_schemas(sde: Path, _: pytest.MonkeyPatch) -> None:
    (sde / "share" / "bf_rt_shared").rmdir()


def without_program(sde: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SDE_INSTALL", str(sde / "other"))


def with_another_port(sde: Path, _: pytest.MonkeyPatch) -> None:
    (noted,) = sde.rglob(CPU_PORT_NOTE)
    noted.write_text("192\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_tools, "needs tofino-model and bf_switchd on PATH: .*--target softswitch needs nothing"),
        (without_model, "needs tofino-model on PATH: an SDE has"),
        (without_schemas, r"bf_rt_shared is missing: bf_switchd must be in the folder bin of an SDE"),
        (without_program, r"the program isn't compiled for tofino: .*--cpu-port 320"),
        (with_another_port, r"compiled for CPU port 192, and the model's is 320: .*--cpu-port 320"),
    ],
)
def test_what_is_missing_is_named(
    sde: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None], words: str
) -> None:
    change(sde, monkeypatch)
    with pytest.raises(LabError, match=words):
        switches.check_target("tofino", load("single_tor").switches)


def test_a_switch_with_too_many_ports_is_refused(sde: Path) -> None:
    large = replace(load("single_tor").switches[0], ports=64)
    with pytest.raises(LabError, match="switch tor has 64 ports, but with --target tofino at most 63"):
        switches.check_target("tofino", [large])


@pytest.mark.parametrize(("name", "status"), [(tofino_model.MODEL, 3), (tofino_model.DRIVERS, 4)])
def test_it_ends_with_either_process(sde: Path, tmp_path: Path, name: str, status: int) -> None:
    script(sde, name, f"exit {status}")
    reason = tofino_model.run(tmp_path / "tor", 2, "127.0.0.1:1")
    assert reason == f"{name} ended with status {status}"
    assert json.loads((tmp_path / "tor" / "ports.json").read_text()) == tofino_model.ports_file(2)


def test_drivers_without_p4runtime_are_named(
    sde: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, p4runtime = free_port(), free_port()
    script(sde, tofino_model.DRIVERS, LISTENS.format(ports=f"{shell},"))
    monkeypatch.setattr(tofino_model, "_SHELL_PORT", shell)
    monkeypatch.setattr(tofino_model, "_P4RUNTIME_SECONDS", 0.3)
    reason = tofino_model.run(tmp_path / "tor", 2, f"127.0.0.1:{p4runtime}")
    assert reason == "bf_switchd has no P4Runtime server: build the drivers with -DPI=ON -DP4RT=ON"


def test_a_port_in_use_is_named(
    sde: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tofino_model, "_FREE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(tofino_model, "_MODEL_PORT", server.getsockname()[1])
        options = ["--folder", str(tmp_path / "tor"), "--ports", "2", "--address", "127.0.0.1:1"]
        assert tofino_model.main(options) == 1
    assert "is in use in the switch's namespace" in capsys.readouterr().out


def test_kill_9_ends_both_processes(sde: Path, tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "tor"), "--ports", "2", "--address", "127.0.0.1:1"]
    process = subprocess.Popen([sys.executable, "-m", "topologies.tofino_model", *options])
    try:
        wait_until(lambda: len(descendants(process.pid)) == 2)
        children = descendants(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not alive(children))
