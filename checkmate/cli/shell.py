"""`checkmate shell`: p4runtime-shell against a job's switch.

p4runtime-shell's generated code loads only with protobuf 3.20 in its pure-Python form, so it lives in an
environment of its own (design, section 8), which `--install` makes beside this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from checkmate.cli.common import UsageFault, err, says_errors
from checkmate.job.files import read_job
from checkmate.job.schema import Switch

ENVIRONMENT = Path(sys.prefix) / "p4runtime-shell"
BACKUP, PRIMARY = 1, 101
"""Election ids below and above the controller's (`controlplane.p4runtime.connection.ELECTION_ID`)."""
PACKAGES = ("p4runtime-shell==0.0.6", "protobuf==3.20.3", "setuptools<81")


@says_errors
def shell(
    job: Annotated[Path | None, typer.Argument(help="A job file.", show_default=False)] = None,
    switch: Annotated[
        str, typer.Option(help="Which of the job's switches; needed where there are several.")
    ] = "",
    primary: Annotated[
        bool, typer.Option("--primary", help="Become the primary, to write; ends a serving `run`.")
    ] = False,
    install: Annotated[bool, typer.Option("--install", help="Make the shell's environment.")] = False,
) -> None:
    """Open p4runtime-shell on a job's switch: a backup, which reads, beside whatever serves it.

    Example: checkmate shell jobs/gpt.yaml --switch tor1
    """
    if install:
        install_shell()
        if job is None:
            return
    if job is None:
        raise UsageFault("name a job file, for its switches' addresses")
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise UsageFault("p4runtime-shell has no environment yet; make it with `checkmate shell --install`")
    one = chosen(read_job(job).fabric.switches, switch)
    if primary:
        err.print(
            f"[yellow]warning:[/yellow] as primary this shell displaces any other controller of {one.name}: "
            "a `checkmate run` that serves it ends with exit status 5",
            soft_wrap=True,
        )
    command, environment = invocation(one, primary=primary)
    os.execve(python, command, environment)


def chosen(switches: Sequence[Switch], name: str) -> Switch:
    """The switch of that name, or the only one."""
    names = ", ".join(s.name for s in switches)
    if not name and len(switches) > 1:
        raise UsageFault(f"the job has several switches; say --switch with one of {names}")
    for one in switches:
        if name in ("", one.name):
            return one
    raise UsageFault(f"the job has no switch {name!r}; there are {names}")


def invocation(switch: Switch, *, primary: bool = False) -> tuple[list[str], dict[str, str]]:
    """The command and environment that open p4runtime-shell on `switch`."""
    command = [
        str(ENVIRONMENT / "bin" / "python"),
        "-m",
        "p4runtime_sh",
        "--grpc-addr",
        switch.address,
        "--device-id",
        str(switch.device_id),
        "--election-id",
        f"0,{PRIMARY if primary else BACKUP}",
    ]
    if switch.tls is not None:
        command += ["--ssl", "--cacert", str(switch.tls.ca)]
        if switch.tls.cert is not None and switch.tls.key is not None:
            command += ["--cert", str(switch.tls.cert), "--private-key", str(switch.tls.key)]
    return command, {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}


def install_shell() -> None:
    """Make the environment, unless it is there and whole."""
    python = ENVIRONMENT / "bin" / "python"
    probe = [str(python), "-c", "import p4runtime_sh.shell"]
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    if (
        python.exists()
        and subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0
    ):
        return
    err.print("making p4runtime-shell's environment ...")
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    result = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UsageFault(f"p4runtime-shell can't be installed: {last}")
