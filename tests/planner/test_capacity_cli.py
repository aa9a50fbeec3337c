"""`checkmate plan --capacity`: its output for a job and a model, and refused options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from testbed.jobs import job_data
from tests.support.cli import invoke


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=2, channels=2, ranks=4)))
    return file


def test_the_command_says_that_it_fits(job_file: Path) -> None:
    line: list[str | Path] = ["plan", job_file, "--capacity", "--model", "gpt3-xl", "--json"]
    code, output = invoke(*line)
    assert code == 0
    report = json.loads(output[output.index("{\n") :])
    assert report["fits"]
    assert report["models"] == [
        {"name": "GPT3-XL", "parameters": 1_315_723_264, "bytes": 2_631_446_528, "dtype": "bfloat16"}
    ]
    assert sum(nic["bytes"] for nic in report["nics"]) == 2_631_446_528
    assert (report["shadow_nics"], report["switch_ports"], report["transceivers"]) == (4, 4, 8)
    assert report["ports_of_the_rule"] == 2
    assert report["streams"] == report["switches"][0]["used"]["streams"] == 8
    assert len(report["not_checked"]) == 2
    assert [len(nic["rounds"]) for nic in report["nics"]] == [3] * 4


def test_the_command_ends_with_2_and_the_whole_plan_where_something_does_not_fit(job_file: Path) -> None:
    line: list[str | Path] = ["plan", job_file, "--capacity", "--model", "LLaMA2-7B"]
    code, output = invoke(*line, "--iteration-time", "100ms", "--node-memory", "16GB", "--json")
    assert code == 2
    report = json.loads(next(text for text in output.splitlines() if text.startswith("{")))
    assert not report["capacity"]["fits"]
    assert [fault["message"] for fault in report["faults"]] == [
        misfit["message"] for misfit in report["capacity"]["misfits"]
    ]
    assert [fault["path"] for fault in report["faults"]] == [
        "channels",
        "shadow_nodes[0].nics[0]",
        "shadow_nodes[0]",
    ]
    assert all("more shadow node" in fault["message"] for fault in report["faults"])
    code, output = invoke(*line, "--iteration-time", "100ms", "--node-memory", "16GB")
    assert code == 2
    assert output.startswith(
        "job demo does not fit. Tightest: memory (node 0), 54.4 GB of 16 GB, 340%; "
        "this would fit with 6 more shadow nodes like it, or with nodes of 54.5 GB; "
        "receiving an iteration and an iteration of a stream do not fit either\n"
    )
    assert f"{job_file}:" in output


def test_groups_on_the_same_hosts_have_shares_without_a_mesh(tmp_path: Path) -> None:
    """As DDP's replicas on a host have."""
    data = job_data(groups=1, ranks=2, nodes=2)
    ranks = data["dp_groups"][0]["ranks"]
    data["hosts"] = [
        {"name": f"gpu{h}", "nics": [{key: rank[key] for key in ("ip", "mac", "switch", "port")}]}
        for h, rank in enumerate(ranks)
    ]
    data["dp_groups"] = [
        {"ranks": [{"rank": 2 * h + i, "host": f"gpu{h}"} for h in range(2)], "shadow_nodes": [i]}
        for i in range(2)
    ]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    line: list[str | Path] = ["plan", file, "--capacity", "--model", "ResNet50"]
    code, output = invoke(*line)
    assert code == 0
    assert "DP groups 0 to 1, together: ResNet50, float32" in " ".join(output.split())
    output = invoke(*line, "--json")[1]
    report = json.loads(output[output.index("{\n") :])
    assert [model["name"] for model in report["models"]] == ["ResNet50"] * 2
    assert sum(shard["elements"] for shard in report["shards"]) == 25_557_032
    code, output = invoke(*line, "--model", "ResNet50")
    assert "DP group 1: ResNet50, float32" in " ".join(output.split()), "two models: a stage each"


def test_the_verdict_comes_first_and_details_only_when_asked_for(job_file: Path) -> None:
    line: list[str | Path] = [
        "plan",
        job_file,
        "--capacity",
        "--model",
        "ResNet50",
        "--nic-rate",
        "200Gbit/s",
    ]
    tables = ("switch tor0 (softswitch)", "shadow NICs: ", "shadow nodes: max", "shards, by DP group")
    code, output = invoke(*line)
    assert code == 0
    assert output.startswith(
        "job demo fits, as far as it was checked. "
        "Tightest: marks (switch tor0), 1 of 16, 6%\n"  # no peak, because any model fills a line
    )
    assert not [table for table in tables if table in output]
    code, output = invoke(*line[:-1], "40Gbit/s", "--node-memory", "500MB")
    assert code == 2
    assert "Tightest: peak rate (NIC 0.0), 100 Gbit/s of 40 Gbit/s, 250%; this would fit with " in output
    assert output.splitlines()[0].endswith("NICs of 100 Gbit/s; memory does not fit either")
    code, output = invoke(*line, "--details")
    assert code == 0
    assert [table for table in tables if table in output] == list(tables)
    rows = [re.split("  +", row.strip()) for row in output.splitlines() if row.rstrip().endswith(" yes")]
    shares = [int(row[4].removesuffix("%")) for row in rows]
    assert len(rows) == 3  # one represents all entities of switches
    assert shares == sorted(shares, reverse=True)


def test_every_check_is_told_as_data_the_tightest_first(job_file: Path) -> None:
    code, output = invoke(
        "plan", job_file, "--capacity", "--model", "ResNet50", "--node-memory", "500MB", "--json"
    )
    assert code == 2
    report = json.loads(next(text for text in output.splitlines() if text.startswith("{")))["capacity"]
    first, *other_checks = report["checks"]
    total = max(node["memory"]["total"] for node in report["nodes"])
    assert (first["what"], first["needed"], first["there"]) == ("memory", total, 500_000_000)
    assert not first["fits"]
    assert all(check["fits"] == (check["share"] <= 1) for check in report["checks"])
    use_of_switch = report["switches"][0]["used"]
    assert {check["what"]: check["needed"] for check in other_checks if not check["unit"]} == use_of_switch


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "--capacity needs --model"),
        (["--model", "GPT9"], "no model GPT9"),
        (["--model", "ResNet50", "--model", "ResNet50"], "--model is given 2 times; job demo has 1"),
        (["--model", "ResNet50", "--optimizer", "adamx"], "no optimizer adamx"),
        (["--model", "ResNet50", "--dtype", "int8"], "no type int8"),
        (["--model", "ResNet50", "--iteration-time", "1"], "--iteration-time must be a time such as"),
        (["--model", "ResNet50", "--iteration-time", "0s"], "--iteration-time must be more than 0"),
        (["--model", "ResNet50", "--link-rate", "100GB/s"], "--link-rate must be a line rate"),
        (["--model", "ResNet50", "--node-memory", "128"], "--node-memory must be a size"),
        (["--model", "ResNet50", "--cores", "4"], "add --profile"),
        (["--model", "ResNet50", "--profile", "/nowhere"], "/nowhere cannot be read"),
        (["--model", "ResNet50", "--profile", "/etc/hostname"], "is not a profile; create one"),
    ],
)
def test_nonsense_is_refused_by_name(job_file: Path, line: list[str], words: str) -> None:
    code, output = invoke("plan", job_file, "--capacity", *line)
    assert code == 2
    assert words in " ".join(output.split())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "ResNet50"),
        ("--optimizer", "adamw"),
        ("--dtype", "float32"),
        ("--iteration-time", "1s"),
        ("--link-rate", "100Gbit/s"),
        ("--nic-rate", "100Gbit/s"),
        ("--node-memory", "1GB"),
        ("--profile", "x.json"),
        ("--cores", "4"),
        ("--receive-buffer", "64"),
    ],
)
def test_options_of_capacity_are_refused_without_it(job_file: Path, option: str, value: str) -> None:
    code, output = invoke("plan", job_file, option, value)
    assert code == 2
    assert f"{option} needs --capacity" in output


@pytest.mark.parametrize(
    "line",
    [
        ["--capacity", "--pfc"],
        ["--capacity", "--bfrt"],
        ["--capacity", "--entries"],
        ["--pfc", "--bfrt"],
        ["--pfc", "--entries"],
        ["--bfrt", "--entries"],
    ],
)
def test_what_cannot_be_done_together_is_refused(job_file: Path, line: list[str]) -> None:
    code, output = invoke("plan", job_file, *reversed(line))
    assert code == 2
    assert f"{line[0]} and {line[1]} exclude each other" in output
    code, output = invoke("plan", job_file, "--capacity", "--model", "ResNet50", "--switch", "tor0")
    assert code == 2
    assert "--switch needs --pfc or --bfrt" in output


def test_what_a_user_wrote_is_told_as_it_is(job_file: Path) -> None:
    for name in ("..:x:", r"a:b\[red]:sob:"):
        code, output = invoke("plan", job_file, "--capacity", "--model", name)
        assert code == 2
        assert f"model {name}:" in output
    code, output = invoke(
        "plan", job_file, "--capacity", "--details", "--model", "tests.support.planner:oddly_named"
    )
    assert code == 0
    assert " [red]:smile:.weight" in output
    assert " [/].bias" in output


def test_two_jobs_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(job_data(f"job{number}", number=number)))
    code, output = invoke("plan", tmp_path, "--capacity", "--model", "ResNet50")
    assert code == 2
    assert "--capacity takes one job and its model, not 2 jobs" in " ".join(output.split())
