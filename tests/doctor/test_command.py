"""`checkmate doctor` as a command, and the lines that processes log when they start."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from checkmate.cli.doctor import UNABLE
from checkmate.cli.main import app
from checkmate.doctor.diagnosis import warn
from checkmate.doctor.subjects import controller, shadow
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.job.validation import data_of
from checkmate.keys.access import INSECURE
from checkmate.keys.making import make_keys
from checkmate.shadow.process import Serving
from testbed.copies import local_job
from testbed.jobs import job_data
from tests.support.cli import COMMAND, invoke
from tests.support.documents import check_document
from tests.support.keys import NOW
from tests.support.labs.end_hosts import needs_buffers
from tests.support.labs.live import needs_root
from tests.support.namespace_host import job_there
from tests.support.switch_process import job_on, softswitch
from topologies.kernel import namespaces

ENDS_SOON = NOW - dt.timedelta(days=700)


def write_job(folder: Path, job: Job | dict[str, Any]) -> Path:
    data = job if isinstance(job, dict) else data_of(job, exclude_none=True)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def document(*arguments: str | Path) -> tuple[int, Any]:
    """Run the command, and return its status and its document, which is as the schema says."""
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    data = json.loads(result.stdout)
    check_document("doctor", data)
    return result.exit_code, data


def of_check(data: Any, check: str) -> list[Any]:
    (role,) = data["roles"]
    return [finding for finding in role["findings"] if finding["check"] == check]


def test_without_a_job_each_role_is_looked_at() -> None:
    code, data = document()
    assert [role["role"] for role in data["roles"]] == ["trainer", "shadow", "controller"]
    assert (code, data["job"]) == (0 if data["able"] else UNABLE, None)
    for role in data["roles"]:
        failed = [finding for finding in role["findings"] if finding["outcome"] == "failed"]
        assert role["able"] == (not failed)
        assert all(
            finding["remedy"] for finding in role["findings"] if finding["outcome"] in ("failed", "warning")
        )
    code, text = invoke("doctor", "--role", "controller")
    assert code == 0
    assert "as a controller\n" in text and "this host can be a controller: 0 checks failed" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "shadw"], "no role 'shadw'; did you mean shadow?"),
        (["--id", "3"], "--id and --host are of a job: give its file too"),
        (["JOB"], "this host has no address of rank 0"),
        (["JOB", "--id", "3"], "job gpt does not have shadow node 3"),
        (["JOB", "--host", "gpu9"], "job gpt does not have the host gpu9"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, arguments: list[str], words: str) -> None:
    file = write_job(tmp_path, job_data("gpt"))
    code, output = invoke("doctor", *(file if argument == "JOB" else argument for argument in arguments))
    assert (code, words in " ".join(output.split())) == (2, True), output
    assert output.count("error:") == 1


@needs_buffers
def test_a_shadow_node_is_known_and_found_running(tmp_path: Path) -> None:
    job = local_job(nodes=1)
    file = write_job(tmp_path, job)
    code, data = document(file)
    assert (code, data["able"]) == (0, True)
    assert "is an address of this host" in data["roles"][0]["guessed"]
    assert [finding["outcome"] for finding in of_check(data, "ports")] == ["ok"]
    with Serving(job, 0):
        _, data = document(file)
    assert of_check(data, "ports")[0]["detail"].endswith(": shadow node 0 runs")


def test_what_is_missing_has_its_remedy_and_the_status_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INSECURE)
    file = write_job(tmp_path, job_data("gpt"))
    code, data = document(file, "--role", "trainer", "--id", "1")
    assert (code, data["able"]) == (UNABLE, False)
    (interface,) = [
        finding for finding in data["roles"][0]["findings"] if finding["check"] == "interface 10.0.0.2"
    ]
    assert (interface["outcome"], "ip address add" in interface["remedy"]) == ("failed", True)
    (keys,) = of_check(data, "keys")
    assert (keys["outcome"], "keys/gpt/trainer" in keys["detail"]) == ("failed", True)
    assert [finding["outcome"] for finding in of_check(data, "shadow nodes")] == ["not applicable"]


@pytest.mark.parametrize(("issued", "outcome"), [(NOW, "ok"), (ENDS_SOON, "warning")])
def test_keys_that_end_soon_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, issued: dt.datetime, outcome: str
) -> None:
    monkeypatch.delenv(INSECURE)
    file = write_job(tmp_path, job_data("gpt"))
    make_keys([(read_job(file), tmp_path / "keys")], issued)
    _, data = document(file, "--role", "shadow", "--id", "0")
    assert [finding["outcome"] for finding in of_check(data, "keys")] == [outcome]


@needs_root
def test_a_process_that_starts_logs_what_it_would_not_say(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with namespaces.entered(host):
        (Path("/proc/sys/net/ipv4/tcp_window_scaling")).write_text("0")
        began = time.monotonic()
        warn([shadow(job_there(), 0)], insecure=True)
        took = time.monotonic() - began
        lines = caplog.messages[:]
        caplog.clear()
        warn([shadow(job_there(ip="10.77.0.9"), 0)], insecure=True)
    assert took < 0.2
    assert [line.partition(":")[0] for line in lines] == ["TCP windows", "MTU", "MTU"]
    assert lines[0].endswith("; sysctl -w net.ipv4.tcp_window_scaling=1")
    assert "eth0 has 576" in lines[1] and lines[1].endswith("; ip link set dev eth0 mtu 1500")
    assert [line.partition(":")[0] for line in caplog.messages] == ["TCP windows"], (
        "the node names the address"
    )


def test_nothing_keeps_a_process_from_starting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its keys are missing: it says that itself, when it reads them."""
    job = read_job(write_job(tmp_path, job_data("gpt")))
    with caplog.at_level(logging.WARNING):
        warn([shadow(job, 0), controller(job)])
    assert caplog.messages == []


@pytest.mark.slow
@needs_buffers
def test_a_shadow_node_logs_it_and_starts(tmp_path: Path) -> None:
    file = write_job(tmp_path, local_job(nodes=1))
    limited = ["sh", "-c", 'ulimit -n 190; exec "$@"', "sh"]
    process = subprocess.Popen(
        [*limited, *COMMAND, "shadow", file, "--id", "0", "--no-view"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline().startswith("ready")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert " open files: 190 open files, of which 2 streams need about 208; `ulimit -n 416`" in errors


def test_a_controller_logs_it_and_the_doctor_finds_its_switch(tmp_path: Path) -> None:
    """Before a program is loaded, after that, and once the switch is away."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != INSECURE}
        command = [*COMMAND, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def switch_of(result: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
        (finding,) = of_check(json.loads(result.stdout), "switch tor0")
        return result.returncode, finding["outcome"], finding["detail"]

    with softswitch("--no-p4") as switch:
        file = job_on(switch, tmp_path)
        file.write_text(file.read_text().replace("192.168.100.0", "127.0.0.1"))  # whose clock answers at once
        make_keys([(read_job(file), tmp_path / "keys")], ENDS_SOON)
        arguments = ("doctor", file, "--role", "controller", "--json")
        code, outcome, detail = switch_of(run(*arguments))
        assert (code, outcome, "runs no program yet" in detail) == (0, "ok", True)
        result = run("run", file, "--once")
        assert result.returncode == 0, result.stderr
        assert result.stderr.count(" keys: the certificate in ") == 1
        code, outcome, detail = switch_of(run(*arguments))
        assert (code, outcome, detail.endswith("and runs Checkmate's program")) == (0, "ok", True)
    code, outcome, detail = switch_of(run(*arguments))
    assert (code, outcome, "Connection refused" in detail) == (UNABLE, "failed", True)
