"""A Tofino's model with its drivers, as one process: a switch of a lab.

`tofino-model` and `bf_switchd` are those of an SDE (github.com/p4lang/open-p4studio), and run in the switch's
namespace, because their TCP ports are fixed. Neither has a clean end, so both are killed with this process.
The drivers start without a program, which the controller loads as on every switch. On the model, they add all
ports themselves, at each load too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from controlplane.tofino.device_config import NotCompiled, read_program
from topologies.describe.job_files import TOFINO_CPU_PORT
from topologies.describe.topology import LabError, SwitchNode
from topologies.kernel.processes import PYTHON

MODEL: Final = "tofino-model"
DRIVERS: Final = "bf_switchd"
PORTS_MAX: Final = 63
"""Of a lab's switch: its port numbers are device ports of the first pipe."""
_MODEL_PORT: Final = 8001
_SHELL_PORT: Final = 9999
"""The drivers open it last but for P4Runtime, whose server is optional."""
_CHIP_TYPE: Final = 2  # Tofino B0
_PORTS_FILE: Final = "ports.json"
_CONFIGURATION: Final = "switch.conf"
_POLL_SECONDS: Final = 0.1
_FREE_SECONDS: Final = 30.0
_P4RUNTIME_SECONDS: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


def check_installed() -> None:
    """Raise `LabError` if the model, the drivers or the program compiled for the model are missing."""
    if missing := [name for name in (MODEL, DRIVERS) if shutil.which(name) is None]:
        raise LabError(
            f"--target tofino needs {' and '.join(missing)} on PATH: an SDE has the model and the drivers "
            "(see checkmate docs tofino); --target softswitch needs nothing"
        )
    if not (shared := installation() / "share" / "bf_rt_shared").is_dir():
        raise LabError(f"{shared} is missing: {DRIVERS} must be in the folder bin of an SDE's installation")
    try:
        program = read_program("tofino", cpu_port=TOFINO_CPU_PORT)
    except NotCompiled as error:
        raise LabError(str(error)) from None
    if program.cpu_port not in (None, TOFINO_CPU_PORT):
        raise LabError(
            f"the program is compiled for CPU port {program.cpu_port}, and the model's is {TOFINO_CPU_PORT}: "
            f"run `python -m p4src.compile tofino --cpu-port {TOFINO_CPU_PORT}`"
        )


def installation() -> Path:
    """Return the SDE's installation, which has the drivers on PATH."""
    drivers = shutil.which(DRIVERS)
    assert drivers is not None, "checked when the lab was made"
    return Path(drivers).resolve().parent.parent


def check_ports(switches: Sequence[SwitchNode]) -> None:
    """Raise `LabError` if a switch has more ports than the model's first pipe."""
    for switch in switches:
        if switch.ports > PORTS_MAX:
            raise LabError(
                f"switch {switch.name} has {switch.ports} ports, but with --target tofino at most {PORTS_MAX}"
            )


def command(switch: SwitchNode, folder: Path) -> list[str]:
    """Return the command line of a lab's switch, whose files are in `folder`. Pure."""
    options = ["--folder", str(folder), "--ports", str(switch.ports), "--address", switch.address]
    return [*PYTHON, "-m", "topologies.tofino_model", *options]


def ports_file(ports: int) -> dict[str, Any]:
    """Return the content of the model's file of ports: device port 1 is the interface port1. Pure."""
    return {"PortToIf": [{"device_port": port, "if": f"port{port}"} for port in range(1, ports + 1)]}


def configuration() -> dict[str, Any]:
    """Return the content of the drivers' file: one chip, without a program. Pure."""
    return {
        "chip_list": [{"chip_family": "tofino", "instance": 0}],
        "p4_devices": [{"device-id": 0, "p4_programs": []}],
    }


def model_command(folder: Path) -> list[str]:
    """Return the command line of the model. Pure."""
    general = ["--chip-type", str(_CHIP_TYPE), "--logs-disable", "--no-cli"]
    return [MODEL, "-d", "1", "-f", str(folder / _PORTS_FILE), *general]


def drivers_command(installed: Path, folder: Path, address: str) -> list[str]:
    """Return the command line of the drivers, with a P4Runtime server at `address`. Pure."""
    files = ["--install-dir", str(installed), "--conf-file", str(folder / _CONFIGURATION)]
    return [DRIVERS, *files, "--init-mode=cold", "--skip-p4", "--background", "--p4rt-server", address]


def _environment(installed: Path) -> Mapping[str, str]:
    libraries = [str(installed / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def _start(argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in `folder`, where it writes files; the kernel kills it when this one ends."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died before that
            os._exit(1)

    return subprocess.Popen(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,  # noqa: PLW1509 -- this process has no threads
    )


def _await_free(port: int) -> None:
    """Wait until a predecessor that was killed has left its TCP port."""
    deadline = time.monotonic() + _FREE_SECONDS
    while _listens("127.0.0.1", port):
        if time.monotonic() > deadline:
            raise LabError(f"TCP port {port} is in use in the switch's namespace; nothing else may run there")
        time.sleep(_POLL_SECONDS)


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _watch(running: Mapping[str, subprocess.Popen[bytes]], address: str) -> str:
    """Return the reason when a process ends, or when the drivers turn out to have no P4Runtime server."""
    host, _, port = address.rpartition(":")
    served, deadline = False, math.inf
    while True:
        for name, process in running.items():
            if process.poll() is not None:
                return f"{name} ended with status {process.returncode}"
        if not served and deadline == math.inf and _listens("127.0.0.1", _SHELL_PORT):
            deadline = time.monotonic() + _P4RUNTIME_SECONDS
        served = served or _listens(host, int(port))
        if not served and time.monotonic() > deadline:
            return f"{DRIVERS} has no P4Runtime server: build the drivers with -DPI=ON -DP4RT=ON"
        time.sleep(_POLL_SECONDS)


def run(folder: Path, ports: int, address: str) -> str:
    """Run model and drivers until one of them ends, which kills the other; return the reason."""
    installed = installation()
    folder.mkdir(exist_ok=True)
    folder.joinpath(_PORTS_FILE).write_text(json.dumps(ports_file(ports)))
    folder.joinpath(_CONFIGURATION).write_text(json.dumps(configuration()))
    _await_free(_MODEL_PORT)
    commands = {MODEL: model_command(folder), DRIVERS: drivers_command(installed, folder, address)}
    environment = _environment(installed)
    running = {name: _start(argv, folder, environment) for name, argv in commands.items()}
    try:
        return _watch(running, address)
    finally:
        for process in running.values():
            process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a switch; it ends only by a failure, whose reason is printed."""
    parser = argparse.ArgumentParser(prog="python -m topologies.tofino_model", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for files and the processes' own logs")
    parser.add_argument("--ports", type=int, required=True, help="number of ports")
    parser.add_argument("--address", required=True, help="of the P4Runtime server")
    options = parser.parse_args(arguments)
    try:
        print(run(options.folder, options.ports, options.address), flush=True)
    except LabError as error:
        print(error, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
