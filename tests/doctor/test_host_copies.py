"""`doctor`, `sysctl` and `keys` of jobs with copies by hosts: gradients' ports, and nothing of switches."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.base.privileges import Capability
from checkmate.doctor import host_checks
from checkmate.doctor.facts import Clock, Facts
from checkmate.doctor.findings import Outcome
from checkmate.doctor.subjects import NoSubject, choose, controller, guess
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.keys.roles import Role
from checkmate.planner.kernel_settings import shadow_node_settings, trainer_settings
from checkmate.shadow.process import Serving
from testbed.ports import free_port
from tests.doctor.test_command import document, of_check
from tests.support.cli import COMMAND, invoke
from tests.support.labs.live import needs_root
from tests.support.units import USER, environment, python

FACTS = Facts("6.1.0", frozenset(), root=False, files=1024, memory=1 << 34, sysctls={}, nics={})
OF_SWITCHES = {
    "cgroup v2",
    "BPF",
    "receive buffers",
    "TCP memory",
    "MTU",
    "offloads",
    "routes",
    "clocks of nodes",
}


def write(folder: Path, *addresses: str, **changes: Any) -> Path:
    """Write a job file of 4 ranks with shadow nodes at these addresses."""
    nodes = [{"id": node, "mgmt": address} for node, address in enumerate(addresses)]
    file = folder / "job.yaml"
    data = {"job": "mine", "copies": "host", "ranks": 4, "shadow_nodes": nodes, **changes}
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.fixture
def remote(tmp_path: Path) -> Job:
    return read_job(write(tmp_path, "cpu0:7000", "cpu1:7000"))


def test_a_host_that_is_no_shadow_nodes_is_a_trainers(remote: Job) -> None:
    subject = guess(remote, lambda _: False, role=None, controls=True)
    assert (subject.role, subject.name) == (Role.TRAINER, "a host of ranks of job mine")
    assert "no shadow node with an address of this host" in subject.guessed
    assert choose(remote, Role.TRAINER, 3, None).ranks == subject.ranks
    assert guess(remote, "cpu1".__eq__, role=None, controls=False).node == remote.node(1)
    assert guess(remote, "cpu1".__eq__, role=Role.TRAINER, controls=False).role is Role.TRAINER
    with pytest.raises(NoSubject, match="job mine has no controller"):
        controller(remote)
    with pytest.raises(NoSubject, match="no address of shadow node 0"):
        guess(remote, lambda _: False, role=Role.SHADOW, controls=False)


@pytest.mark.parametrize("role", [Role.TRAINER, Role.SHADOW])
def test_neither_role_needs_capabilities_or_a_new_kernel(role: Role) -> None:
    finding = host_checks.capabilities(role, set(), tags=False, ports=[7000], by_hosts=True)
    assert finding.outcome is Outcome.SKIPPED
    assert not host_checks.kernel(role, "5.10.0", by_hosts=True).is_bad
    assert host_checks.kernel(role, "5.4.0", by_hosts=True).outcome is Outcome.WARNING


def test_a_port_below_1024_needs_a_capability() -> None:
    def check(*capabilities: Capability) -> Outcome:
        return host_checks.capabilities(
            Role.SHADOW, capabilities, tags=False, ports=[7, 7000], by_hosts=True
        ).outcome

    assert check() is Outcome.FAILED
    assert check(Capability.NET_BIND_SERVICE) is Outcome.OK


def test_small_limits_of_buffers_are_a_warning_with_a_remedy() -> None:
    limits = {"net.ipv4.tcp_rmem": "4096\t131072\t212992", "net.ipv4.tcp_wmem": "4096\t16384\t4194304"}
    finding = host_checks.part_buffers(replace(FACTS, sysctls=limits), 4 << 20)
    assert finding.outcome is Outcome.WARNING
    assert finding.remedy == 'sysctl -w "net.ipv4.tcp_rmem=4096 131072 4194304"'
    limits["net.ipv4.tcp_rmem"] = "4096\t131072\t6291456"
    assert host_checks.part_buffers(replace(FACTS, sysctls=limits), 4 << 20).outcome is Outcome.OK
    assert host_checks.part_buffers(FACTS, 4 << 20).outcome is Outcome.SKIPPED


def test_windows_and_clocks_matter_less() -> None:
    facts = replace(FACTS, sysctls={"net.ipv4.tcp_window_scaling": "0"}, clock=Clock(False, 0.0))
    assert host_checks.windows(Role.SHADOW, facts, by_hosts=True).outcome is Outcome.WARNING
    assert host_checks.windows(Role.SHADOW, facts).outcome is Outcome.FAILED
    clock = host_checks.clock(Role.SHADOW, facts, by_hosts=True)
    assert (clock.outcome, "controller" in clock.detail) == (Outcome.WARNING, False)


def test_running_nodes_are_found_with_their_ports_for_gradients(tmp_path: Path) -> None:
    file = write(tmp_path, f"127.0.0.1:{free_port()}")
    code, data = document(file)
    assert (code, data["roles"][0]["name"]) == (0, "shadow node 0 of job mine")
    assert of_check(data, "ports")[0]["detail"].count("127.0.0.1:") == 3
    code, data = document(file, "--role", "trainer")
    assert of_check(data, "shadow nodes")[0]["outcome"] == "warning"
    with Serving(read_job(file), 0):
        code, data = document(file, "--role", "trainer")
        assert code == 0
        assert [of_check(data, check)[0]["outcome"] for check in ("gradients", "step records")] == ["ok"] * 2
        checks = {finding["check"] for finding in data["roles"][0]["findings"]}
        assert not checks & OF_SWITCHES
        _, data = document(file, "--role", "shadow", "--id", "0")
    checks = {finding["check"] for finding in data["roles"][0]["findings"]}
    assert {"memory", "open files", "socket buffers", "keys"} <= checks
    assert not checks & OF_SWITCHES


def test_a_closed_port_for_gradients_is_named(tmp_path: Path) -> None:
    """The node listens elsewhere than the trainer's job file says, or a firewall is between them."""
    file = write(tmp_path, f"127.0.0.1:{free_port()}")
    with Serving(read_job(file), 0):
        data = yaml.safe_load(file.read_text())
        data["shadow_nodes"][0]["gradients"] = f"127.0.0.1:{(closed := free_port())}"
        file.write_text(yaml.safe_dump(data))
        code, report = document(file, "--role", "trainer")
    (finding,) = of_check(report, "gradients")
    assert (code, finding["outcome"]) == (9, "failed")
    assert f"shadow node 0 at 127.0.0.1:{closed}: Connection refused" in finding["detail"]
    assert "firewall" in finding["remedy"]


@needs_root
@pytest.mark.parametrize("role", [["--role", "trainer"], ["--role", "shadow", "--id", "0"]])
def test_an_ordinary_users_host_can_be_both(role: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        file = write(Path(name), f"127.0.0.1:{free_port()}")
        result = subprocess.run(
            [*USER, python(), *COMMAND[1:], "doctor", file, *role, "--insecure", "--json"],
            env=environment(Path(name)),
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["able"] is True


def test_kernel_settings_are_those_of_ordinary_buffers(remote: Job) -> None:
    low = {"net.ipv4.tcp_rmem": "4096 131072 65536", "net.ipv4.tcp_wmem": "4096 16384 65536"}
    assert [(s.key, s.value) for s in shadow_node_settings(remote, 64 << 20, low.get)] == [
        ("net.ipv4.tcp_rmem", "4096 131072 4194304"),
        ("net.ipv4.ip_local_reserved_ports", "7000-7002"),
    ]
    assert [setting.key for setting in trainer_settings(remote, low.get)] == ["net.ipv4.tcp_wmem"]
    assert trainer_settings(remote, lambda _: None) == []


def test_sysctl_and_keys_speak_of_no_switch(tmp_path: Path) -> None:
    file = write(tmp_path, "cpu0:7000")
    for role in ("trainer", "shadow"):
        code, output = invoke("sysctl", file, "--role", role)
        assert (code, "ring" in output) == (0, False), output
    assert invoke("sysctl", file, "--role", "shadow", "--receive-buffer", "8")[0] == 2
    code, output = invoke("keys", file)
    assert (code, "checkmate run" in output) == (0, False), output
    assert "nowhere: with" in output  # the rest may be folded


@needs_root
@pytest.mark.parametrize("command", ["status", "doctor", "report"])
def test_keys_of_another_user_are_named(command: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        file = write(folder, f"127.0.0.1:{free_port()}", keys="keys")
        assert invoke("keys", file)[0] == 0
        argv = [*USER, python(), "-m", "checkmate.cli.entry", command, str(file)]
        result = subprocess.run(argv, env=environment(folder), capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert "Traceback" not in result.stderr
        assert "by this user" in " ".join((result.stdout + result.stderr).split())
