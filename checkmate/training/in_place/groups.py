"""Process groups and wrappers of one attempt: made after a meeting, aborted on a loss, and released."""

from __future__ import annotations

import inspect
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed's, where mypy finds it
from torch.nn.parallel import DistributedDataParallel

from checkmate.training.in_place.attendance import NodeStore

_log: Final = logging.getLogger("checkmate")

_FAMILIES: Final = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_LISTENING: Final = "0A"
"""TCP_LISTEN in /proc/net/tcp (linux/net/tcp_states.h)."""


class ProcessGroups:
    """All process groups of a process during one attempt."""

    def __init__(self, store: NodeStore, rank: int, world: int, backend: str | None, timeout: float) -> None:
        """Make the default group. All ranks of the meeting call it.

        Args:
            store: The meeting's store.
            rank: This process's global rank.
            world: The number of ranks.
            backend: As in `torch.distributed.init_process_group`; by default gloo, with NCCL for GPUs.
            timeout: In seconds, of collectives and of the group's making.
        """
        self._store: Final = store
        self._aborting = threading.Lock()
        self.is_aborted = False
        # PyTorch numbers groups, also those whose making failed, and the number is in the store's keys:
        # survivors and new processes would wait for each other under different ones.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"),
            store=PrefixStore("checkmate", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )

    def abort(self) -> None:
        """Have all collectives fail, also one that another thread waits in. Does nothing if called again."""
        with self._aborting:
            if self.is_aborted:
                return
            self.is_aborted = True
            for sock in gloo_sockets(self._store.published):
                with sock, suppress(OSError):  # it is not connected any more
                    sock.shutdown(socket.SHUT_RDWR)
            if torch.cuda.is_available() and dist.is_initialized() and _has_nccl():
                dist.distributed_c10d._abort_process_group()

    def release(self) -> None:
        """Destroy all groups, after a failure."""
        self.abort()
        self.end()

    def end(self) -> None:
        """Destroy all groups, as a script does at its end."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Wrappers:
    """The DistributedDataParallel wrappers that one call of the training function makes."""

    def __init__(self) -> None:
        self._all: WeakSet[DistributedDataParallel] = WeakSet()

    @contextmanager
    def watch(self, *, broadcast: bool) -> Iterator[None]:
        """Note the wrappers that the script makes in this context.

        Args:
            broadcast: Whether wrappers broadcast the first rank's parameters. It may be a new process, whose
                parameters would replace those that survivors have trained; `restore` gives all ranks the same
                state then. What the script asks for itself counts.
        """
        original = DistributedDataParallel.__init__
        signature = inspect.signature(original)

        @wraps(original)
        def init(wrapper: DistributedDataParallel, *args: Any, **keywords: Any) -> None:
            script_arguments = signature.bind_partial(wrapper, *args, **keywords).arguments
            if not broadcast and "init_sync" not in script_arguments:
                keywords["init_sync"] = False
            original(wrapper, *args, **keywords)
            self._all.add(wrapper)

        DistributedDataParallel.__init__ = init  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DistributedDataParallel.__init__ = original  # type: ignore[method-assign]

    def release(self) -> None:
        """Have them take no gradient any more.

        A script may hold the last wrapper until it has the next one, or longer. Its reducer waits in the
        middle of a backward pass, and would fail with the first gradient of another.
        """
        for wrapper in self._all:
            wrapper.reducer._remove_autograd_hooks()


def _has_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config(None))


def gloo_sockets(published: Iterable[bytes]) -> Iterator[socket.socket]:
    """Yield this process's connections of gloo, as duplicates that the caller closes.

    gloo has no abort. Each of its groups waits for its sockets with one epoll instance, in which is also the
    socket that listens, at an address that it has published in the store.

    Args:
        published: Values that this process has set in the store.
    """
    ports = _listening_ports()
    values = list(published)
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            if "eventpoll" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                continue
            targets = _targets(descriptor)
            inodes = {target: _inode(target) for target in targets}
            listening = [ports[inode] for inode in inodes.values() if inode in ports]
            if not any(address in value for address in listening for value in values):
                continue
            for target, inode in inodes.items():
                if inode and inode not in ports:  # gloo ends the process if its listener fails
                    yield socket.socket(fileno=os.dup(target))


def _targets(epoll: str) -> list[int]:
    """Return the descriptors for which an epoll instance waits."""
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _inode(descriptor: int) -> str:
    """Return the number of a socket, or "" if the descriptor is of something else."""
    with suppress(OSError):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.startswith("socket:["):
            return name.removeprefix("socket:[").rstrip("]")
    return ""


def _listening_ports() -> dict[str, bytes]:
    """Return the sockets that listen on this host, by number: family and port as a `sockaddr` has them."""
    ports = {}
    for family, name in _FAMILIES.items():
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                port = int(fields[1].rpartition(":")[2], 16)
                ports[fields[9]] = struct.pack("=H", family) + struct.pack(">H", port)
    return ports
