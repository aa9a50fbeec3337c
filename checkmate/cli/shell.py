"""`checkmate shell`: open p4runtime-shell on a job's switch.

The generated code of p4runtime-shell loads only with the pure-Python form of protobuf 3.20. It therefore has
its own environment (design, section 8), which `--install` creates beside this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from checkmate.cli.common import OptionalJobArgument, UsageFault, err, require_switches, show_errors
from checkmate.job.files import read_job
from checkmate.job.schema import Switch
from checkmate.output.consoles import spinner

ENVIRONMENT = Path(sys.prefix) / "p4runtime-shell"
BACKUP = "0,1"
"""The shell's election id beside a controller: high and low word, below any controller's."""
_PIP_WITH_PYTHON = (22, 3)
"""The first with `--python`."""
PRIMARY_TERM = 1 << 32
"""Controllers count terms, the high word (`controlplane.election`), from 1, and never get here."""
REQUIREMENTS = Path(__file__).with_name("shell.txt")
"""Its packages, with the hashes of their files (`tools.lock` renews them)."""


@show_errors
def shell(
    job: OptionalJobArgument = None,
    switch: Annotated[str, typer.Option(help="Name of the switch; needed if the job has several.")] = "",
    primary: Annotated[
        bool, typer.Option("--primary", help="Become primary, to write; ends a `run` on that switch.")
    ] = False,
    install: Annotated[bool, typer.Option("--install", help="Create the shell's environment.")] = False,
) -> None:
    """Open p4runtime-shell on a job's switch, as a read-only backup beside the serving controller.

    Example: checkmate shell jobs/gpt.yaml --switch tor1
    """
    if install:
        install_shell()
        if job is None:
            return
    if job is None:
        raise UsageFault("specify a job file; it has the addresses of the switches")
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise UsageFault("p4runtime-shell is not installed; install it with `checkmate shell --install`")
    loaded = read_job(job)
    require_switches([loaded], "shell")
    target = choose_switch(loaded.fabric.switches, switch)
    if primary:
        err.print(
            f"[yellow]warning:[/yellow] as primary this shell displaces any other controller of "
            f"{target.name}: a `checkmate run` that serves it ends with exit status 5",
            soft_wrap=True,
        )
    command, environment = invocation(target, primary=primary)
    os.execve(python, command, environment)


def choose_switch(switches: Sequence[Switch], name: str) -> Switch:
    """Return the switch of that name, or the only one. Raise `UsageFault` if there is none."""
    names = ", ".join(s.name for s in switches)
    if not name and len(switches) > 1:
        raise UsageFault(f"the job has several switches; add --switch with one of {names}")
    for switch in switches:
        if name in ("", switch.name):
            return switch
    raise UsageFault(f"the job has no switch {name!r}; its switches are {names}")


def invocation(switch: Switch, *, primary: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment that open p4runtime-shell on `switch`."""
    command = [
        str(ENVIRONMENT / "bin" / "python"),
        "-P",
        "-m",
        "p4runtime_sh",
        "--grpc-addr",
        switch.address,
        "--device-id",
        str(switch.device_id),
        "--election-id",
        f"{PRIMARY_TERM + int(time.time())},0" if primary else BACKUP,
    ]
    if switch.tls is not None:
        command += ["--ssl", "--cacert", str(switch.tls.ca)]
        if switch.tls.cert is not None and switch.tls.key is not None:
            command += ["--cert", str(switch.tls.cert), "--private-key", str(switch.tls.key)]
    return command, {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}


def install_shell() -> None:
    """Create the environment, unless it exists and works. Raise `UsageFault` if pip refuses a package."""
    python = ENVIRONMENT / "bin" / "python"
    probe = [str(python), "-c", "import p4runtime_sh.shell"]
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    if (
        python.exists()
        and subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0
    ):
        return
    with spinner(err, "installing p4runtime-shell"):
        result = _install(python)
    if result.returncode:
        raise UsageFault(f"p4runtime-shell can't be installed: {_reason(result.stderr)}")


def _pip() -> tuple[int, ...]:
    """Return the version of this environment's pip; empty if there is none."""
    try:
        return tuple(int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return ()


def _install(python: Path) -> subprocess.CompletedProcess[str]:
    has_own_pip = _pip() >= _PIP_WITH_PYTHON  # there already, and newer than Python's own
    venv.create(ENVIRONMENT, with_pip=not has_own_pip, clear=True)
    pip: list[str | Path] = (
        [sys.executable, "-P", "-m", "pip", "--python", python]
        if has_own_pip
        else [python, "-P", "-m", "pip"]
    )
    command = [*pip, "install", "-q", "--disable-pip-version-check", "--require-hashes"]
    command += ["--no-deps", "--only-binary", ":all:", "--requirement", REQUIREMENTS]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _reason(complaint: str) -> str:
    """Return pip's error, without the warnings before it, on one line."""
    error = complaint[max(complaint.find("ERROR: "), 0) :].removeprefix("ERROR: ")
    return " ".join(error.split()) or "pip printed no reason"
