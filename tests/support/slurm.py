"""A cluster of Slurm in a lab: its controller beside the lab's, and a daemon in each host's namespace."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import wait_until
from topologies.crew import Crew
from topologies.describe.topology import CONTROLLER, MGMT_NET
from topologies.lab import Lab

DAEMONS: Final = ("slurmctld", "slurmd", "slurmstepd", "sbatch")
needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, DAEMONS)), reason="Slurm (slurmctld, slurmd, slurm-client) is not on PATH"
)
# Each daemon takes names of hosts from the cluster's own file.
_WITH_NAMES: Final = 'mount --bind "$0" /etc/hosts && exec "$@"'


def _program(name: str) -> str:
    return str(shutil.which(name))


class Cluster:
    """Slurm on a lab's hosts; `names` has the name in Slurm of each host of the lab."""

    def __init__(self, lab: Lab, crew: Crew, names: Mapping[str, str]) -> None:
        self._lab, self._folder = lab, lab.directory / "slurm"
        self._folder.mkdir()
        addresses = {names[host.name]: host.mgmt for host in lab.topology.hosts}
        self._hosts = self._folder / "hosts"
        lines = [f"{address} {name}" for name, address in addresses.items()]
        self._hosts.write_text(
            "\n".join(["127.0.0.1 localhost", f"{MGMT_NET[1]} {socket.gethostname()}", *lines])
        )
        self._configure({name: str(address) for name, address in addresses.items()})
        self.environment: Final = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        self._start(crew, "slurmctld", CONTROLLER, [_program("slurmctld"), "-D"])
        for host, name in names.items():
            step = ["-d", str(Path(_program("slurmstepd")).resolve())]
            self._start(crew, name, host, [_program("slurmd"), "-D", "-N", name, *step])
        wait_until(
            lambda: self.run("sinfo", "-h", "-o", "%T %D").split() == ["idle", str(len(names))], "idle"
        )

    def _configure(self, addresses: Mapping[str, str]) -> None:
        """Write the cluster's configuration. It trusts everybody, because it is in namespaces only."""
        plugins = next(
            (Path(_program("slurmctld")).resolve().parents[1] / "lib").glob("**/auth_none.so")
        ).parent
        me, at = socket.gethostname(), self._folder
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": f"{me}({MGMT_NET[1]})",
            "SlurmUser": "root",
            "AuthType": "auth/none",
            "AuthInfo": "cred_expire=5",  # so that a job that is queued again need not wait two minutes
            "CredType": "cred/none",
            "PluginDir": plugins,
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "StateSaveLocation": at / "state",
            "SlurmdSpoolDir": f"{at}/spool.%n",
            "SlurmctldPidFile": at / "slurmctld.pid",
            "SlurmdPidFile": f"{at}/slurmd.%n.pid",
            "SchedulerParameters": "bf_interval=1,sched_interval=1",
            "SlurmdParameters": "config_overrides",
            "SlurmdTimeout": 0,
            "KillWait": 5,
        }
        nodes = [
            f"NodeName={n} NodeHostname={me} NodeAddr={a} CPUs=2 Port=6818" for n, a in addresses.items()
        ]
        lines = [f"{key}={value}" for key, value in settings.items()]
        partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        (at / "slurm.conf").write_text("\n".join([*lines, *nodes, partition, ""]))
        (at / "state").mkdir()

    def _start(self, crew: Crew, name: str, node: str, command: list[str]) -> None:
        words = ["unshare", "--mount", "sh", "-c", _WITH_NAMES, str(self._hosts), *command]
        crew.start(name, node, words, environment=self.environment)

    def run(self, *command: str, folder: Path | None = None, **environment: str) -> str:
        """Run one of Slurm's commands beside its controller; return its output."""
        words = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder or self._folder), *command]
        variables = {**self.environment, **environment}
        process = self._lab.start(
            CONTROLLER, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, environment=variables
        )
        output, _ = process.communicate(timeout=60)
        return output.decode()

    def state(self, number: str) -> str:
        """Return a job's state, such as `RUNNING`."""
        output = self.run("scontrol", "show", "job", number)
        return output.partition("JobState=")[2].partition(" ")[0]
