"""Commands with an operator's fabric file; `run` against a real switch process."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkmate.job.schema import Switch
from controlplane.entities import Holdings
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession
from testbed.jobs import job_data
from tests.support.cli import COMMAND, invoke
from tests.support.grants import fabric_of
from tests.support.job_files import edited, write
from tests.support.switch_process import LOOP, softswitch

PORT = "dp_groups/0/ranks/0/port"
SECONDS = 30.0


@pytest.mark.parametrize("command", [["validate"], ["plan"], ["status"], ["remove"], ["run", "--once"]])
def test_commands_refuse_what_is_not_granted(tmp_path: Path, command: list[str]) -> None:
    first, two = job_data("one"), job_data("two", number=1)
    fabric = write(tmp_path, fabric_of(first, two), "fabric.yaml")
    job = write(tmp_path, edited(two, PORT, 1))
    status, output = invoke(*command, job, "--fabric", fabric)
    assert status == 2
    assert f"{job}:" in output
    assert "dp_groups[0].ranks[0].port: switch port tor0 1 is granted to job 'one'" in output


def test_validate_accepts_what_is_granted(tmp_path: Path) -> None:
    data = job_data("one")
    fabric = write(tmp_path, fabric_of(data), "fabric.yaml")
    job = write(tmp_path, data)
    assert invoke("validate", job, "--fabric", fabric)[0] == 0
    assert json.loads(invoke("plan", job, "--fabric", fabric, "--json")[1])["switches"].keys() == {"tor0"}
    status, output = invoke("validate", tmp_path, "--fabric", tmp_path / "none.yaml")
    assert status == 2
    assert "none.yaml: (file): cannot be read" in output
    job.unlink()
    status, output = invoke("validate", tmp_path, "--fabric", fabric)
    assert (status, "no job file" in output) == (2, True)


def holdings_of(switch: Switch) -> Holdings:
    async def read() -> Holdings:
        async with SwitchSession(switch, Codec.for_switch(switch)) as session:
            return await session.read()

    return LOOP.run_until_complete(read())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def on(switch: Switch, data: dict[str, Any]) -> dict[str, Any]:
    return edited(data, "fabric/switches/0/address", switch.address)


def test_a_job_that_claims_too_much_while_it_runs_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    log = tmp_path / "log"
    with softswitch("--no-p4") as switch:
        first, two = on(switch, job_data("one")), on(switch, job_data("two", number=1))
        fabric = write(tmp_path, fabric_of(first, two), "fabric.yaml")
        write(folder, first, "1.yaml")
        write(folder, two, "2.yaml")
        command = [*COMMAND, "run", "--insecure", "--no-view", "--fabric", str(fabric), str(folder)]
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                until(lambda: "serving" in log.read_text())
                before = holdings_of(switch)
                write(folder, edited(two, PORT, 1), "2.yaml")
                until(lambda: "is granted to job 'one'" in log.read_text())
                until(lambda: "job files or keys changed: 0 updates written" in log.read_text())
                assert holdings_of(switch).entries == before.entries
                assert holdings_of(switch).groups == before.groups
                write(folder, {**first, "channels": 2}, "1.yaml")
                until(lambda: holdings_of(switch).entries != before.entries)
                own_sources = {entry for entry in before.entries.values() if entry.table == "sources"}
                assert own_sources <= set(holdings_of(switch).entries.values())
            finally:
                process.terminate()
    assert "Traceback" not in log.read_text()
