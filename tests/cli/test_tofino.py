"""`checkmate plan` for Tofinos: limits, --pfc, --bfrt, as text and as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from checkmate.cli.main import app
from testbed.jobs import job_data, tofino_job_data


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def write(folder: Path, name: str = "job", **kwargs: Any) -> Path:
    switch = kwargs.pop("switch", {})
    tag = kwargs.pop("tag", {})
    data = tofino_job_data(name, **kwargs)
    data["fabric"]["switches"][0] |= switch
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**data, "tag": tag}, sort_keys=False))
    return file


@pytest.mark.parametrize("target", ["tofino", "tofino2"])
def test_limits_are_the_chips(tmp_path: Path, target: str) -> None:
    switch: dict[str, Any] = {}
    if target == "tofino2":
        switch = {"front_panel": None, "ports": {f"{n}/0": 8 * n for n in range(1, 6)}}
    code, output, _ = invoke(write(tmp_path, target=target, switch=switch), "--json")
    assert code == 0
    switch_report = json.loads(output)["switches"]["tor0"]
    assert switch_report["target"] == target
    assert switch_report["limits"]["multicast groups"] == 65535
    assert switch_report["limits"]["multicast nodes"] == {"tofino": 20889, "tofino2": 26214}[target]
    assert switch_report["limits"]["replication"] == 8192
    ports = {replica["port"] for group in switch_report["groups"] for replica in group["replicas"]}
    assert ports == {"tofino": {128, 136, 144, 152, 160}, "tofino2": {8, 16, 24, 32, 40}}[target]


def test_pfc_as_text_is_for_people_and_for_a_shell(tmp_path: Path) -> None:
    code, output, errors = invoke(write(tmp_path), "--pfc")
    assert code == 0
    assert "switch tor0 (tofino): priority 3; " in output
    assert "1/0  rank 0 of job" in output
    assert "own frame) + 84 (PFC frame) + 632 (cable, both ways)" in output
    assert "# shadow node 0 of job, at tor0 4/0" in output
    assert 'dcb pfc set dev "$DEV" prio-pfc all:off 3:on' in output
    assert "With PFC, training waits" in errors


def lossy(folder: Path) -> Path:
    """Write a job whose copies may be lost."""
    file = write(folder)
    file.write_text(f"{file.read_text()}lossless: false\n")
    return file


def test_a_job_whose_copies_may_be_lost_needs_no_pfc(tmp_path: Path) -> None:
    code, output, errors = invoke(lossy(tmp_path), "--pfc")
    assert code == 0
    assert "switch tor0 needs no PFC" in output and "send lost copies again" in output
    assert "dcb pfc" not in output and "training waits" not in errors
    assert json.loads(invoke(lossy(tmp_path), "--pfc", "--json")[1])["hosts"] == []


def test_its_script_pauses_nothing(tmp_path: Path) -> None:
    code, output, _ = invoke(lossy(tmp_path), "--bfrt")
    assert code == 0
    compile(output, "tor0.py", "exec")
    assert "PFC = 0" in output and "TM.ppg" not in output and "def watchdog" not in output
    assert '(128, "1/0", "rank 0 of job"' in output


def test_pfc_as_data(tmp_path: Path) -> None:
    code, output, _ = invoke(write(tmp_path, tag={"priority": 4}), "--pfc", "--json")
    report = json.loads(output)
    assert code == 0
    (switch,) = report["switches"].values()
    assert (switch["priority"], switch["watchdog"], len(switch["senders"])) == (4, 200, 3)
    for sender in switch["senders"]:
        room = sender["headroom"]
        assert room["bytes"] == sum(v for k, v in room.items() if k not in ("bytes", "cells"))
        assert sender["admitted"] == switch["threshold"] + room["cells"]
    assert [host["host"] for host in report["hosts"]] == [
        *(f"rank {number} of job" for number in range(3)),
        "shadow node 0 of job",
        "shadow node 0 of job",
    ]


def test_a_script_is_python_for_one_switch(tmp_path: Path) -> None:
    job = write(tmp_path)
    code, output, _ = invoke(job, "--bfrt")
    assert code == 0
    compile(output, "tor0.py", "exec")
    assert '(128, "1/0", "rank 0 of job", "BF_SPEED_100G", "BF_FEC_TYP_REED_SOLOMON"),' in output
    assert (
        json.loads(invoke(job, "--bfrt", "--json")[1])["switches"]["tor0"]["script"].rstrip()
        == output.rstrip()
    )


def test_of_several_switches_one_is_named(tmp_path: Path) -> None:
    data = job_data(switches=3, target="tofino")
    for switch in data["fabric"]["switches"]:
        switch["ports"] = {f"{number}/0": 4 * number for number in range(1, 10)}
    data["fabric"]["switches"][2].pop("ports")
    data["fabric"]["switches"][2]["target"] = "bmv2"
    hosts = [*data["dp_groups"][0]["ranks"], *data["shadow_nodes"][0]["nics"]]
    links = [end for link in data["fabric"]["links"] for end in link]
    for number, place in enumerate([*hosts, *links], 1):
        place["port"] = 30 + number if place["switch"] == "tor2" else f"{number}/0"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    code, _, errors = invoke(file, "--bfrt")
    assert (code, "add --switch tor0 or --switch tor1" in errors) == (2, True)
    code, output, _ = invoke(file, "--bfrt", "--switch", "tor1")
    assert (code, "for tor1 (tofino)" in output) == (0, True)
    assert '"switch tor0"' in output
    code, _, errors = invoke(file, "--pfc", "--switch", "tor2")
    assert (code, "Tofinos: tor0, tor1" in errors) == (2, True)
    hosts_found = json.loads(invoke(file, "--pfc", "--json")[1])["hosts"]
    assert {host["switch"] for host in hosts_found} == {"tor0", "tor1"}


def test_no_headroom_is_bad_input_at_its_place(tmp_path: Path) -> None:
    file = write(tmp_path, switch={"pfc": {"cells": 5000}})
    code, output, errors = invoke(file, "--pfc", "--json")
    (fault,) = json.loads(output)["faults"]
    assert (code, fault["path"]) == (2, "fabric")
    assert file.read_text().splitlines()[fault["line"] - 1].startswith("fabric:")
    assert "1397 x 2 (1/0) + 1397 x 1 (2/0) + 1397 x 2 (3/0) = 6985 cells of the 5000" in fault["message"]
    assert "the rest is -1985" in errors


def test_two_priorities_on_one_dscp_are_bad_input(tmp_path: Path) -> None:
    write(tmp_path, "a")
    second = write(tmp_path, "b", number=1, tag={"priority": 5})
    code, output, _ = invoke(tmp_path, "--pfc", "--json")
    (fault,) = json.loads(output)["faults"]
    assert (code, fault["file"], fault["path"]) == (2, str(second), "tag.priority")
    assert "DSCP 0 would have priority 5 here and 3 in job 'a'" in fault["message"]
    assert invoke(tmp_path)[0] == 0  # without PFC they may


def test_what_is_for_tofinos_says_so(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data()))
    for option in ("--pfc", "--bfrt"):
        code, _, errors = invoke(file, option)
        assert (code, "the jobs' switches are tor0 (softswitch)" in errors) == (2, True)
    code, _, errors = invoke(file, "--switch", "tor0")
    assert (code, "--switch needs --pfc or --bfrt" in errors) == (2, True)
