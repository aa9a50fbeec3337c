"""A rank whose `checkmate.protect` fails half-way in several ways, and reports leaked resources.

`python -m tests.scripts.half_way FOLDER`, with torchrun's environment; leaves rank{r}.json.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.ring.place import DEFAULT_PORT
from checkmate.training.attached import attached
from checkmate.training.record.wrapped import ClipListener
from checkmate.training.start.places import Handover


class NoScaler:
    """An object with state that is not a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}


def with_a_hook_of_its_own(ddp: DistributedDataParallel) -> None:
    """Protect a model that already has a hook; DDP accepts one."""
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def that_takes_no_hook(ddp: DistributedDataParallel) -> None:
    """Protect a model that refuses hooks, which is detected last."""

    def refuse(state: object, hook: object) -> None:
        raise RuntimeError("no hook")

    ddp.register_comm_hook = refuse  # type: ignore[method-assign]


def leftovers(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return threads, hooks, the tagger's descriptors and the ring's sockets."""
    folder = Path("/proc/self/fd")
    links = []
    for name in os.listdir(folder):
        with suppress(OSError):
            links.append((int(name), os.readlink(folder / name)))
    return {
        "threads": sorted(
            thread.name for thread in threading.enumerate() if not thread.name.startswith("Main")
        ),
        "hooks": len(ddp._forward_pre_hooks) + len(optimizer._optimizer_step_pre_hooks),
        "clipped": sum(attached(p, ClipListener) is not None for p in ddp.parameters()),
        "protected": Handover.protected is not None,
        "tagger": sum("bpf" in link for _, link in links),
        "ring": sum(is_of_the_ring(number) for number, link in links if link.startswith("socket:")),
        "interval": sys.getswitchinterval(),
    }


def is_of_the_ring(number: int) -> bool:
    """Return whether a socket listens, or is connected, at one of the ring's ports."""
    # gRPC may close its sockets meanwhile, and their numbers may be reused.
    with suppress(OSError):
        copy = os.dup(number)
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return False
        with sock:
            return sock.family == socket.AF_INET and any(
                DEFAULT_PORT <= port < DEFAULT_PORT + 8 for port in (sock.getsockname()[1], _peer(sock))
            )
    return False


def _peer(sock: socket.socket) -> int:
    with suppress(OSError):
        return int(sock.getpeername()[1])
    return 0


def failing(prepare: Callable[[DistributedDataParallel], None], **more: Any) -> dict[str, Any]:
    """Protect a new model, which fails; return the error and the leaked resources."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    prepare(ddp)
    error = ""
    try:
        checkmate.protect(ddp, optimizer, wait=5, **more)
    except Exception as failure:  # noqa: BLE001 - whatever it is
        error = f"{type(failure).__name__}: {failure}"
    report = {"error": error, **leftovers(ddp, optimizer)}
    ddp(torch.ones(2, 4)).sum().backward()  # the script continues without it
    return report


def main() -> None:
    """Fail in all ways; the last one is without the other rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    report = {
        "hook": failing(with_a_hook_of_its_own),
        "late": failing(that_takes_no_hook),
        "scaler": failing(lambda ddp: None, scaler=NoScaler()),
    }
    if rank == 0:
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        dist.barrier()
        try:
            checkmate.protect(ddp, optimizer, wait=5)
        except Exception as failure:  # noqa: BLE001 - whatever it is
            report["alone"] = {"error": type(failure).__name__, **leftovers(ddp, optimizer)}
    else:
        DistributedDataParallel(nn.Linear(4, 4))
        dist.barrier()
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
