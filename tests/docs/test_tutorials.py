"""The tutorials' commands run as they stand, one page after another; only the name of the lab differs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs.live import needs_root
from tests.support.units import NOBODY, USER, environment, python

ROOT = Path(__file__).parents[2]
LABS = {
    "1-laptop": "try",
    "2-script": "mine",
    "4-operate": "ops",
    "5-recover": "crash",
    "6-shards": "shards",
}
"""By page, the name that its lab has. The third page has no lab."""
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def lab(name: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name; what the page leaves in `out` is removed."""
    yield name
    subprocess.run(["rm", "-rf", ROOT / "out" / name], check=True)


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", LABS)
def test_a_tutorial_works(page: str, lab: str) -> None:
    text = (ROOT / "docs" / "tutorial" / f"{page}.md").read_text()
    script = re.sub(rf"\b{LABS[page]}\b", lab, "\n".join(_BLOCK.findall(text)))
    begin = "set -eux -o pipefail\nranks=() shadows=()\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    script = begin + script
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


@needs_root
@pytest.mark.timeout(600)
def test_the_first_tutorial_works_for_an_ordinary_user() -> None:
    """In a network namespace of the test's own, because the page names ports."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, NOBODY, NOBODY)
        modules = {
            "python": "",
            "checkmate": "-m checkmate.cli.entry",
            "torchrun": "-m torch.distributed.run",
        }
        (folder / "bin").mkdir()
        for command, module in modules.items():
            (folder / "bin" / command).write_text(f'#!/bin/sh\nexec {python()} {module} "$@"\n')
            (folder / "bin" / command).chmod(0o755)
        (folder / "mine").mkdir()
        os.chown(folder / "mine", NOBODY, NOBODY)
        text = (ROOT / "docs" / "tutorial" / "0-any-network.md").read_text()
        begin = "set -eux -o pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
        script = begin + "test -z \"$(awk '/^CapEff/ && $2 !~ /^0+$/' /proc/self/status)\"\n"
        script += "\n".join(_BLOCK.findall(text))
        variables = environment(folder)
        del variables["OMP_NUM_THREADS"]
        variables["PATH"] = f"{folder}/bin:{variables['PATH']}"
        as_user = " ".join([*USER, "bash", "-c", '"$0"'])
        result = subprocess.run(
            ["unshare", "-n", "bash", "-c", f"ip link set lo up && exec {as_user}", script],
            cwd=folder / "mine",
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        logs = "".join(file.read_text()[-3000:] for file in (folder / "mine").glob("*.log"))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:] + logs
    assert "equal to the last bit" in result.stdout
    assert "without keys" not in logs


@needs_root
@pytest.mark.parametrize("target", ["softswitch", "simple_switch_grpc"])
def test_switches_are_connected_as_the_third_tutorial_says(target: str, tmp_path: Path) -> None:
    """In a namespace of its own, with the page's commands in order, without a Tofino's and training's."""
    environment = {name: value for name, value in os.environ.items() if name != "CHECKMATE_INSECURE"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    if shutil.which(target, path=environment["PATH"]) is None:
        pytest.skip(f"{target} is not installed")
    text = (ROOT / "docs" / "tutorial" / "3-switch.md").read_text()
    (start,) = re.findall(rf"\| `({target} [^`]*)` \|", text)
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    lines = [line.partition("#")[0].strip() for line in blocks if line.startswith("checkmate ")]
    commands = [line for line in lines if "--bfrt" not in line and "--wait" not in line]
    assert [line.split()[1] for line in commands] == ["validate", "plan", "keys", "run"]
    (init,) = re.findall(r"`(checkmate init [^`]*)`", text)
    script = f"""
        set -eux -o pipefail
        trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
        ip link set lo up
        for port in 1 2; do
            ip link add eth$port type veth peer name host$port
            ip link set eth$port up
        done
        mkdir jobs
        {init} --target {"bmv2" if target == "simple_switch_grpc" else "softswitch"}
        {start} >switch.log 2>&1 &
        {" && ".join(commands[:-1])}
        {commands[-1]} >run.log 2>&1 &
        until grep -q 'serving' run.log; do kill -0 $!; sleep 0.1; done
        checkmate status jobs/ || test $? = 1
    """
    result = subprocess.run(
        ["unshare", "-n", "bash", "-c", script],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:] + logs
    assert "without keys" not in logs
