"""`checkmate sysctl`: what a job's hosts need, and that the kernel takes it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.planner.kernel_settings import Present, Setting, shadow_node_settings, trainer_settings
from checkmate.shadow.receive import connect
from testbed.jobs import job, job_data
from tests.support.cli import invoke

BUFFER = 64 << 20
PORTS = "net.ipv4.ip_local_reserved_ports"


def host(values: Mapping[str, str] | None = None) -> Present:
    """Return a host with these settings, and none else."""
    return (values or {}).get


def values(settings: list[Setting]) -> dict[str, str]:
    return {setting.key: setting.value for setting in settings}


def test_the_memory_of_a_shadow_node_is_what_it_checks_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    demo_job = job(nodes=1, channels=4, groups=2)  # 2 groups, 2 sides, 4 channels, and one for records
    memory_setting = values(shadow_node_settings(demo_job, BUFFER, host()))["net.ipv4.tcp_mem"]
    assert int(memory_setting.split()[0]) * resource.getpagesize() == 17 * 2 * BUFFER
    monkeypatch.setattr(connect, "_TCP_MEM", tmp_path / "tcp_mem")
    (tmp_path / "tcp_mem").write_text(memory_setting)
    assert connect.tcp_memory_shortfall(17) is None


def test_nodes_on_one_machine_share_its_memory() -> None:
    data = job_data(nodes=4)
    apart = values(shadow_node_settings(of_data(Job, data), BUFFER, host()))["net.ipv4.tcp_mem"]
    for number, node in enumerate(data["shadow_nodes"]):
        node["mgmt"] = f"192.168.9.9:{7000 + 2 * number}"
    together = values(shadow_node_settings(of_data(Job, data), BUFFER, host()))
    assert int(together["net.ipv4.tcp_mem"].split()[0]) == 4 * int(apart.split()[0])
    assert together[PORTS] == "7000-7007"


def test_no_value_is_below_the_hosts_own() -> None:
    there = {
        "net.ipv4.tcp_mem": "1\t2\t99999999",
        "net.core.rmem_max": "8388608",
        PORTS: "80,6999,47003-47009",
    }
    shadow = values(shadow_node_settings(job(), BUFFER, host(there)))
    fresh = values(shadow_node_settings(job(), BUFFER, host()))["net.ipv4.tcp_mem"].split()
    assert shadow["net.ipv4.tcp_mem"] == " ".join([*fresh[:2], "99999999"])
    assert shadow[PORTS] == "80,6999-7001,47003-47009"
    trainers = values(trainer_settings(job(channels=2), host(there)))
    assert (trainers["net.core.rmem_max"], trainers["net.core.wmem_max"]) == ("8388608", "4194304")
    assert trainers[PORTS] == "80,6999,47000-47001,47003-47009"


def test_ranks_that_share_an_address_have_ports_of_their_own() -> None:
    settings = values(trainer_settings(job(groups=2, ranks=2, channels=2, shared=True), host()))
    assert settings[PORTS] == "46000-46003,47000-47001,47008-47009"


def test_rules_for_several_nics_are_only_for_hosts_that_have_them() -> None:
    def names(settings: list[Setting]) -> set[str]:
        return {setting.key.rpartition(".")[2] for setting in settings if ".conf." in setting.key}

    rules = {"arp_ignore", "arp_announce", "rp_filter"}
    assert names(shadow_node_settings(job(nics=2), BUFFER, host())) == rules
    assert names(shadow_node_settings(job(nics=1), BUFFER, host())) == set()
    assert names(trainer_settings(job(), host())) == set()
    data = job_data(groups=2, ranks=2)
    for group in data["dp_groups"]:
        for rank in group["ranks"]:
            rank["mgmt"] = f"gpu{rank['rank'] % 2}"
    assert names(trainer_settings(of_data(Job, data), host())) == rules


@pytest.mark.parametrize(("there", "expected"), [("0", "1"), ("1", "1"), ("2", "2"), ("8", "8")])
def test_a_host_that_answers_arp_for_less_still_does(there: str, expected: str) -> None:
    key = "net.ipv4.conf.all.arp_ignore"
    for settings in (
        shadow_node_settings(job(nics=2), BUFFER, host({key: there})),
        shadow_node_settings(job(nics=2), BUFFER, host({key: there, "net.ipv4.conf.all.rp_filter": "1"})),
    ):
        assert values(settings)[key] == expected
        assert values(settings)["net.ipv4.conf.all.rp_filter"] == "2"


@pytest.mark.parametrize("role", ["shadow", "trainer"])
@pytest.mark.skipif(os.geteuid() != 0, reason="sets the kernel's values in a network namespace")
def test_the_kernel_takes_every_line(tmp_path: Path, role: str) -> None:
    """Those of the whole machine, which a namespace does not have or cannot write, are compared in form."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(groups=2)))
    code, text = invoke("sysctl", file, "--role", role)
    assert code == 0
    lines = [line.split(" = ") for line in text.splitlines() if line and not line.startswith("#")]
    script = "\n".join(
        [
            "import json, pathlib, sys",
            "found = {}",
            "for key, value in json.load(sys.stdin):",
            "    path = pathlib.Path('/proc/sys', *key.split('.'))",
            "    try: path.write_text(value); found[key] = path.read_text().split()",
            "    except (FileNotFoundError, PermissionError): pass",
            "print(json.dumps(found))",
        ]
    )
    result = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    accepted_settings = json.loads(result.stdout)
    assert PORTS in accepted_settings
    for key, value in lines:
        if key in accepted_settings:
            assert accepted_settings[key] == value.split()
        else:
            assert key in ("net.ipv4.tcp_mem", "net.core.rmem_max", "net.core.wmem_max")
            assert len(Path("/proc/sys", *key.split(".")).read_text().split()) == len(value.split())


def test_the_file_has_a_reason_for_each_value_and_bad_input_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data()))
    code, text = invoke("sysctl", file, "--role", "shadow", "--receive-buffer", "128")
    assert code == 0
    blocks = text.strip().split("\n\n")[1:]
    assert len(blocks) == 4 and all(block.startswith("# ") for block in blocks)
    assert "with buffers of 128 MB" in text
    code, text = invoke("sysctl", file, "--role", "trainer", "--receive-buffer", "128")
    assert (code, text) == (2, "error: --receive-buffer is of shadow nodes; use it with --role shadow\n")
    assert invoke("sysctl", tmp_path / "none.yaml", "--role", "shadow")[0] == 2
    code, text = invoke("sysctl", file, "--role", "reader")
    expected = "error: hosts of role reader need no kernel settings; --role is trainer or shadow\n"
    assert (code, text) == (2, expected)
    expected = "error: no role shdow; --role is trainer or shadow\n"
    assert invoke("sysctl", file, "--role", "shdow") == (2, expected)
