"""Metrics of real processes: the embedded switch, a controller and a shadow node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from checkmate.keys.access import INSECURE
from checkmate.shadow.process import Serving
from softswitch import process
from softswitch.options import parse
from testbed.copies import local_job
from testbed.jobs import job_data
from testbed.ports import free_port
from tests.support.switch_process import job_on, softswitch
from tests.support.waiting import wait_until

Samples = dict[tuple[str, str], float]


def scraped(port: int) -> Samples:
    """Return the samples of a process, by name and switch."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, s.labels.get("switch", "")): s.value for family in families for s in family.samples}


def readiness(port: int) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return str(answer.read().decode()).strip()
    except HTTPError as error:
        return f"{error.code} {error.read().decode().strip()}"
    except URLError:
        return "nothing answers"


class ServingReached(Exception):
    """Ends a switch where it would begin to answer P4Runtime."""


def test_metrics_of_a_switch_answer_before_p4runtime_does(monkeypatch: pytest.MonkeyPatch) -> None:
    port, answers = free_port(), []

    def server(*_: object) -> None:
        answers.append(readiness(port))
        raise ServingReached

    monkeypatch.setattr(process, "P4RuntimeServer", server)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(process, "drop_privileges", lambda _: None)  # they are this process's
    with pytest.raises(ServingReached):
        process.run(
            parse(
                ["--no-p4", "--grpc-server-addr", f"127.0.0.1:{port + 1}", "--metrics", f"127.0.0.1:{port}"]
            )
        )
    assert answers == ["503 no program is loaded"]


@contextmanager
def controller(job: Path, port: int, *options: str) -> Iterator[None]:
    command = [sys.executable, "-m", "checkmate.cli.entry", "run", "--no-view", str(job), *options]
    process = subprocess.Popen(
        [*command, "--metrics", f"127.0.0.1:{port}"], env={**os.environ, INSECURE: "1"}
    )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_a_switch_and_its_controllers(tmp_path: Path) -> None:
    of_switch, first, second = free_port(), free_port(), free_port()
    with softswitch("--no-p4", "--metrics", f"127.0.0.1:{of_switch}") as switch:
        assert readiness(of_switch) == "503 no program is loaded"
        job = job_on(switch, tmp_path)
        with controller(job, first, "--standby"):
            wait_until(lambda: readiness(first) == "ready")
            assert readiness(of_switch) == "ready"
            assert scraped(of_switch)["checkmate_softswitch_primaries", ""] == 1
            with controller(job, second, "--standby"):
                wait_until(lambda: readiness(second) == "503 standing by")
                served, waiting = scraped(first), scraped(second)
        assert served["checkmate_controller_primary", switch.name] == 1
        assert served["checkmate_controller_term", switch.name] == 1
        assert served["checkmate_switch_up", switch.name] == 1
        assert served["checkmate_reconcile_duration_seconds_count", switch.name] == 1
        assert served["checkmate_stream_connected", switch.name] == 0
        standby = ("checkmate_controller_standby", "")
        assert (served[standby], waiting[standby]) == (0, 1)


@pytest.mark.parametrize("command", ["softswitch", "shadow", "run", "consolidate"])
def test_an_address_that_cannot_be_used_ends_the_process_at_once(command: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(job_data()))
    cli = ["-m", "checkmate.cli.entry"]
    arguments = {
        "softswitch": ["-m", "softswitch", "--no-p4", "--grpc-server-addr", f"127.0.0.1:{free_port()}"],
        "shadow": [*cli, "shadow", str(job), "--id", "0"],
        "run": [*cli, "run", str(job)],
        "consolidate": [*cli, "consolidate", str(job), "--out", str(tmp_path), "--every", "10"],
    }
    result = subprocess.run(
        [sys.executable, *arguments[command], "--metrics", "nowhere"],
        env={**os.environ, INSECURE: "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "--metrics nowhere: must be an address such as 127.0.0.1:9460" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="receive buffers need CAP_NET_ADMIN")
def test_a_shadow_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSECURE, "1")
    port = free_port()
    with Serving(local_job(), 0, metrics=f"127.0.0.1:{port}"):
        assert readiness(port) == "503 no training has begun"
        assert scraped(port)["checkmate_shadow_seeds_total", ""] == 0
    assert readiness(port) == "nothing answers"


def test_what_keeps_checkpoints_on_disk(tmp_path: Path) -> None:
    job, port = tmp_path / "job.yaml", free_port()
    data = job_data()
    for node in data["shadow_nodes"]:
        node["mgmt"] = f"127.0.0.1:{free_port()}"
    job.write_text(yaml.safe_dump(data))
    command = ["consolidate", str(job), "--out", str(tmp_path / "kept"), "--every", "10"]
    process = subprocess.Popen(
        [sys.executable, "-m", "checkmate.cli.entry", *command, "--metrics", f"127.0.0.1:{port}"],
        env={**os.environ, INSECURE: "1"},
    )
    try:
        wait_until(lambda: "503 no shadow node of job" in readiness(port))
        samples = scraped(port)
        assert samples["checkmate_consolidate_failures_total", ""] == 1
        assert samples["checkmate_consolidate_every_iterations", ""] == 10
        assert samples["checkmate_consolidate_saved_iteration", ""] == -1
    finally:
        process.terminate()
    assert process.wait(20) == 0
