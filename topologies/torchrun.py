"""Command lines for training in a lab: one `torchrun` per rank, in the rank's namespace. Pure.

They meet over the management network. torchrun numbers its nodes by their addresses, compared as text, so
the ranks' management addresses sort like the ranks.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from topologies.describe.topology import Host, Topology
from topologies.kernel.links import MGMT_INTERFACE

PORT: Final = 29400
RESTARTS: Final = 10
"""Restarts of a job: one crash may use up two, if some ranks come back before the others have noticed."""
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


def nccl_environment(host: str) -> dict[str, str]:
    """Return the environment in which NCCL takes a namespace for a host, so that ranks may share a GPU."""
    return {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": MGMT_INTERFACE}


def command(
    topology: Topology, rank: Host, script: Sequence[str | Path], *, restarts: int = RESTARTS
) -> list[str | Path]:
    """Return the command line of one rank's torchrun; the first rank's host has the rendezvous.

    Args:
        topology: The lab.
        rank: The rank.
        script: The training script and its arguments.
        restarts: How often torchrun restarts the whole job when a rank dies. A host's
            TORCHELASTIC_RESTART_COUNT counts only the deaths of its own rank.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(topology.ranks)}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={topology.ranks[0].mgmt}:{PORT}",
        f"--rdzv-conf=is_host={int(rank == topology.ranks[0])}",
        f"--rdzv-id={topology.name}",
        f"--local-addr={rank.mgmt}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        *script,
    ]


def loop(topology: Topology, inside: str, script: Sequence[str | Path]) -> str:
    """Return one line of sh that starts every rank's torchrun and waits for them.

    Args:
        topology: The lab.
        inside: The sh that runs a command on the host that follows: `checkmate lab exec LAB`.
        script: The training script and its arguments, which are quoted; the shell variable `r` is the rank.
    """
    ranks = topology.ranks
    first = command(topology, ranks[0], script)
    words = [shlex.quote(str(word)) for word in first]
    base, _, last = str(ranks[0].mgmt).rpartition(".")
    replaced = {
        f"--rdzv-conf=is_host={int(True)}": "--rdzv-conf=is_host=$((r == 0))",
        f"--local-addr={ranks[0].mgmt}": f"--local-addr={base}.$((r + {last}))",
    }
    started = " ".join(replaced.get(word, word) for word in words)
    return f"for r in $(seq 0 {len(ranks) - 1}); do {inside} rank$r -- {started} & done; wait"
