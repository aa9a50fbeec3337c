"""How training is started in a lab: one `torchrun` for each rank, in the rank's namespace. Pure.

They meet over the management network. torchrun numbers its nodes by their addresses, compared as text,
which is why the ranks' management addresses sort as the ranks do.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from topologies.describe.topology import Host, Topology
from topologies.kernel.links import MGMT_INTERFACE
from topologies.kernel.namespaces import name_of

PORT: Final = 29400
ENVIRONMENT: Final[Mapping[str, str]] = {
    "GLOO_SOCKET_IFNAME": MGMT_INTERFACE,
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""For each of them; hosts in namespaces share one name, so gloo has to be told its interface.

Each start gets a store of its own: ranks that died at different times don't wait for each other's keys. In
torchrun's own, where a second rank is killed 1.5 s after a first, the others find addresses of the dead: gloo
can't connect to them, each such start counts, and the job ends.
"""


def command(
    topology: Topology, rank: Host, script: Sequence[str | Path], *, restarts: int = 0
) -> list[str | Path]:
    """The command line of one rank's torchrun; the first rank's host holds the rendezvous.

    `script`: the training script and its arguments. `restarts`: how often torchrun starts the whole job
    again when a rank dies; a host's TORCHELASTIC_RESTART_COUNT counts only the deaths of its own rank.
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


def loop(topology: Topology, lab: str, job_file: object, script: Sequence[str | Path]) -> str:
    """The same for people: one line of sh that starts every rank's torchrun and waits for them.

    `script` is quoted; ranks are told apart by the shell's `$r`.
    """
    ranks = topology.ranks
    first = command(topology, ranks[0], script)
    words = [shlex.quote(str(word)) for word in first]
    base, _, last = str(ranks[0].mgmt).rpartition(".")
    replaced = {
        f"--rdzv-conf=is_host={int(True)}": "--rdzv-conf=is_host=$((r == 0))",
        f"--local-addr={ranks[0].mgmt}": f"--local-addr={base}.$((r + {last}))",
    }
    environment = {**ENVIRONMENT, "CHECKMATE_JOB": str(job_file)}
    started = [
        *("ip", "netns", "exec", f"{name_of(lab, 'rank')}$r", "env"),
        *(f"{key}={shlex.quote(value)}" for key, value in environment.items()),
        *(replaced.get(word, word) for word in words),
    ]
    return f"for r in $(seq 0 {len(ranks) - 1}); do {' '.join(started)} & done; wait"
