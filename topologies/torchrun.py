"""Command lines for training in a lab: one `torchrun` or `checkmate launch` per host, in its namespace. Pure.

They meet over the management network. torchrun numbers its nodes by their addresses, compared as text, so
the hosts' management addresses sort like their ranks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from topologies.describe.topology import LabHost, Topology
from topologies.kernel.links import MGMT_INTERFACE
from topologies.kernel.processes import PYTHON

Starter = Literal["torchrun", "torchrun alone", "launch", "launch --spare"]
"""The program that starts a host's ranks, and starts them again.

torchrun restarts all ranks if one dies; with "torchrun alone", each host's ranks are a job of their own, and
are restarted alone. `checkmate launch` starts only the rank that died, or has a warm spare take its place.
"""
PORT: Final = 29400
RESTARTS: Final = 10
"""Restarts of a job: one crash may use up two, if some ranks come back before the others have noticed."""
LAUNCHED: Final = re.compile(r"rank \d+ is process (\d+)$", re.MULTILINE)
"""What `checkmate launch` logs of each process that it starts; a warm spare is its child, too."""
ENVIRONMENT: Final[Mapping[str, str]] = {
    "GLOO_SOCKET_IFNAME": MGMT_INTERFACE,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""Environment of processes in a lab. Hosts in namespaces share one name, so gloo needs the interface.

Each start gets its own store. With torchrun's own store, if a second rank is killed 1.5 s after a first, the
others find addresses of dead ranks: gloo cannot connect to them, each such start counts, and the job ends.
"""
DEFAULTS: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""The same, unless the user's own environment has them. c10d would log that addresses have no host names."""


def keeps_processes(starter: Starter) -> bool:
    """Return whether ranks keep their processes when another one dies, so that their script has to, too."""
    return starter in ("launch", "launch --spare")


def nccl_environment(host: str) -> dict[str, str]:
    """Return the environment in which NCCL takes a namespace for a host, so that ranks may share a GPU."""
    return {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": MGMT_INTERFACE}


def command(
    topology: Topology,
    host: LabHost,
    script: Sequence[str | Path],
    *,
    restarts: int = RESTARTS,
    starter: Starter = "torchrun",
) -> list[str | Path]:
    """Return the command line that starts one host's ranks; the first host has torchrun's rendezvous.

    Args:
        topology: The lab.
        host: The host, of one rank or several.
        script: The training script and its arguments.
        restarts: How often torchrun restarts the whole job when a rank dies, and how often `checkmate launch`
            starts each rank of this host again. A host's TORCHELASTIC_RESTART_COUNT counts only the deaths
            of its own ranks.
        starter: The program.
    """
    hosts = topology.trainers
    ranks = len(topology.ranks) // len(hosts)
    if starter == "torchrun":
        return _torchrun(hosts[0], host, len(hosts), ranks, topology.name, script, restarts)
    if starter == "torchrun alone":
        return _torchrun(host, host, 1, ranks, host.name, script, restarts)
    return [
        *PYTHON,
        "-m",
        "checkmate.cli.entry",
        "launch",
        f"--nnodes={len(hosts)}",
        f"--node-rank={hosts.index(host)}",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        *(["--spare"] if starter == "launch --spare" else []),
        "--",
        *script,
    ]


def _torchrun(
    first: LabHost,
    host: LabHost,
    hosts: int,
    ranks: int,
    name: str,
    script: Sequence[str | Path],
    restarts: int,
) -> list[str | Path]:
    return [
        *PYTHON,
        "-m",
        "torch.distributed.run",
        f"--nnodes={hosts}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.mgmt}:{PORT}",
        f"--rdzv-conf=is_host={int(host == first)}",
        f"--rdzv-id={name}",
        f"--local-addr={host.mgmt}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        *script,
    ]


def loop(topology: Topology, inside: str, script: Sequence[str | Path]) -> str:
    """Return one line of sh that starts every host's torchrun and waits for them.

    Args:
        topology: The lab.
        inside: The sh that runs a command on the host that follows: `checkmate lab exec LAB`.
        script: The training script and its arguments, quoted; the shell variable `r` is the host's number.
    """
    hosts = topology.trainers
    first = command(topology, hosts[0], script)
    words = [shlex.quote(str(word)) for word in first]
    base, _, last = str(hosts[0].mgmt).rpartition(".")
    replaced = {
        f"--rdzv-conf=is_host={int(True)}": "--rdzv-conf=is_host=$((r == 0))",
        f"--local-addr={hosts[0].mgmt}": f"--local-addr={base}.$((r + {last}))",
    }
    command_line = " ".join(replaced.get(word, word) for word in words)
    name = hosts[0].name.rstrip("0")
    return f"for r in $(seq 0 {len(hosts) - 1}); do {inside} {name}$r -- {command_line} & done; wait"
