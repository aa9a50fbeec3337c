"""A small job with live recovery, in this network namespace: a rank is killed and comes back.

It prints JSON: each rank's iterations with the number of ranks in each, and the digest of its final state.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmarks.comparators import packages

packages.use()

from torchft.coordination import LighthouseServer  # noqa: E402

from benchmarks.comparators.live import LiveRecovery, Meeting  # noqa: E402
from topologies.training.verdict import digest  # noqa: E402

HOST = "127.0.0.1"
RANKS, UNTIL = 3, 60
KILLED, IN_ITERATION = 1, 8


def main() -> None:
    """Start the ranks, and the killed one again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "benchmarks.comparators.live"])
    lighthouse = LighthouseServer(
        bind=f"{HOST}:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1000
    )
    url = f"http://{HOST}:{lighthouse.address().rpartition(':')[2]}"
    begin = context.Barrier(RANKS)

    def start(rank: int, again: bool) -> tuple[Connection, multiprocessing.process.BaseProcess]:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(rank, url, sender, None if again else begin))
        process.start()
        sender.close()
        return receiver, process

    jobs = [start(rank, False) for rank in range(RANKS)]
    jobs[KILLED][1].join()
    status = jobs[KILLED][1].exitcode
    jobs[KILLED] = start(KILLED, True)
    results = [_receive(end) for end, _ in jobs]
    for rank, (_, process) in enumerate(jobs):
        process.join()
        if process.exitcode:
            raise SystemExit(f"rank {rank} ended with status {process.exitcode}")
    lighthouse.shutdown()
    print(json.dumps({"status": status, "ranks": results}))


def _receive(end: Connection) -> object:
    """Return what a rank says; `None` if it has ended without a word."""
    try:
        return end.recv()
    except EOFError:
        return None


def train(rank: int, url: str, end: Connection, begin: object) -> None:
    """Train as rank `rank`; with `begin`, rank KILLED kills itself in an iteration."""
    live = LiveRecovery(rank, Meeting(url, HOST, HOST))
    torch.manual_seed(rank)  # the first quorum takes one rank's state
    model = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Linear(65, 3))
    ddp = live.parallel(model, 25)
    raw = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = live.attach(ddp, raw)
    if begin is not None:
        begin.wait()  # type: ignore[attr-defined]
    iterations = []
    while (iteration := live.recover()) < UNTIL:
        generator = torch.Generator().manual_seed(1000 * iteration + rank)
        optimizer.zero_grad()
        loss = ddp(torch.randn(4, 16, generator=generator)).square().mean()
        if begin is not None and (rank, iteration) == (KILLED, IN_ITERATION):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        if live.recover() > iteration:
            iterations.append((live.recover() - 1, live.taking_part()))
        time.sleep(0.1)
    end.send((iterations, digest([model.state_dict(), raw.state_dict()]).hex()))
    live.close()


if __name__ == "__main__":
    main()
