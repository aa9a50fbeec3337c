"""The launcher of a host: one process for each of its ranks, and a warm spare."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final

from checkmate.launch.restarts import Restarts, exit_words
from checkmate.launch.spare import MESSAGE_BYTES, die_with_parent
from checkmate.launch.word import PIPE_VARIABLE

_log: Final = logging.getLogger("checkmate")

FORK_SECONDS: Final = 10.0
"""Seconds that a spare has to fork a process; then it is not used any more."""
END_SECONDS: Final = 10.0
"""Seconds that ranks have to end after SIGTERM."""
_TICK_SECONDS: Final = 0.5
_PR_SET_CHILD_SUBREAPER: Final = 36
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class HostRanks:
    """The ranks of this host."""

    first: int
    count: int
    world: int
    node: int
    """This host's number."""

    def common_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return what all ranks' environments have."""
        # As torchrun does, unless the user has set it.
        return {**({"OMP_NUM_THREADS": "1"} if self.count > 1 else {}), **inherited}

    def environment(self, local: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return a rank's environment, with torchrun's variables. `local`: its number on this host."""
        return {
            **self.common_environment(inherited),
            "RANK": str(self.first + local),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.count),
            "GROUP_RANK": str(self.node),
        }


class Launcher(AbstractContextManager["Launcher"]):
    """Starts a host's ranks, and each one again that ends with an error. `run` returns the exit status."""

    def __init__(self, ranks: HostRanks, script: Sequence[str], restarts: Restarts, *, spare: bool) -> None:
        """Create it; `__enter__` takes over SIGINT, SIGTERM and SIGHUP.

        Args:
            ranks: The ranks of this host.
            script: The arguments of `python`.
            restarts: Decides which ranks are started again.
            spare: Whether to hold a warm spare, from which they are forked.
        """
        self._ranks = ranks
        self._script = list(script)
        self._restarts = restarts
        self._with_spare = spare
        self._spare: Spare | None = None
        self._pids: dict[int, int] = {}
        """Local numbers of ranks, by process."""
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, int] = {}
        """The reading end of each rank's pipe, by local number."""
        self._partial: dict[int, bytes] = {}
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[int, Any]] = []
        self._ended_by: int | None = None
        self._trouble = ""
        self._has_failed = False
        """Whether a rank has failed after the training."""

    def __enter__(self) -> Launcher:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # of what the spare forks
        self._before = [(number, signal.signal(number, self._note)) for number in (*_ENDING, signal.SIGCHLD)]
        self._old_wake = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_all()
        finally:
            if self._spare is not None:
                self._spare.close()
            signal.set_wakeup_fd(self._old_wake)
            for number, handler in self._before:
                signal.signal(number, handler)
            self._selector.close()
            for descriptor in (*self._wake, *self._pipes.values()):
                os.close(descriptor)

    def run(self) -> int:
        """Run the ranks to their end; return 0 if all have ended well."""
        for local in range(self._ranks.count):
            _log.info("rank %d is process %d", self._ranks.first + local, self._start(local))
        if self._with_spare:
            self._spare = Spare(self._script, self._ranks.common_environment(os.environ))
            self._selector.register(self._spare.socket, selectors.EVENT_READ)
        while self._pids and self._ended_by is None and not self._trouble:
            for key, _ in self._selector.select(_TICK_SECONDS):
                self._take(key.fd)
            self._reap()
            for rank in self._restarts.silent(time.monotonic()):
                self._kill_silent(rank)
        if self._trouble:
            _log.error("%s", self._trouble)
            return 1
        if self._ended_by is not None:
            return 128 + self._ended_by
        return int(self._has_failed)

    def _note(self, number: int, _: object) -> None:
        if number in _ENDING:
            self._ended_by = number

    def _take(self, descriptor: int) -> None:
        if descriptor == self._wake[0]:
            with suppress(BlockingIOError):
                os.read(descriptor, 1 << 16)
            return
        if self._spare is not None and descriptor == self._spare.socket.fileno():
            self._hear_spare(self._spare)
            return
        local = next(local for local, pipe in self._pipes.items() if pipe == descriptor)
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._forget_pipe(local)
            return
        *lines, self._partial[local] = (self._partial.get(local, b"") + data).split(b"\n")
        for line in lines:
            self._restarts.hear(self._ranks.first + local, line.decode(errors="replace"), time.monotonic())

    def _hear_spare(self, spare: Spare) -> None:
        """Hear whether the spare is ready; it tells nothing else on its own."""
        if not spare.hear():
            self._selector.unregister(spare.socket)
            _log.warning("no warm spare: %s; a rank that dies is started by a new interpreter", spare.trouble)
            spare.close()
            self._spare = None

    def _forget_pipe(self, local: int) -> None:
        self._partial.pop(local, None)
        if (pipe := self._pipes.pop(local, None)) is not None:
            self._selector.unregister(pipe)
            os.close(pipe)

    def _start(self, local: int) -> int:
        """Start a rank's process, and return its number."""
        self._forget_pipe(local)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            environment = self._ranks.environment(local, os.environ)
            pid = None
            if self._spare is not None and self._spare.is_ready:
                pid = self._spare.fork(environment, writing)
            if pid is None:
                pid = _spawn([sys.executable, *self._script], environment, writing)
        finally:
            os.close(writing)
        self._pids[pid] = local
        self._pipes[local] = reading
        self._selector.register(reading, selectors.EVENT_READ)
        return pid

    def _reap(self) -> None:
        """Start ranks again that have ended with an error."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            local = self._pids.pop(pid, None)
            if local is None:
                continue  # the spare, or what a rank has left behind
            code = os.waitstatus_to_exitcode(status)
            if local in self._pipes and self._has_data(local):
                self._take(self._pipes[local])  # its last words
            rank = self._ranks.first + local
            if code == 0:
                continue
            if self._restarts.is_done(rank):
                _log.error(
                    "rank %d %s after all ranks were done with training: it is not started again",
                    rank,
                    exit_words(code),
                )
                self._has_failed = True
                continue
            if why := self._restarts.end(rank, code):
                self._trouble = self._trouble or why
                continue
            if self._ended_by is None and not self._trouble:
                _log.warning("rank %d %s, and is started again", rank, exit_words(code))
                _log.info("rank %d is process %d", rank, self._start(local))

    def _has_data(self, local: int) -> bool:
        return any(key.fd == self._pipes[local] for key, _ in self._selector.select(0))

    def _kill_silent(self, rank: int) -> None:
        local = rank - self._ranks.first
        for pid in [pid for pid, number in self._pids.items() if number == local]:
            _log.warning(
                "rank %d (process %d) has not run for %g s, and is killed: its host is short of memory, or "
                "something has stopped it",
                rank,
                pid,
                self._restarts.patience,
            )
            self._restarts.ranks[rank].heard_at = None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """End all ranks: by SIGTERM, and those that take longer by SIGKILL."""
        deadline = time.monotonic() + END_SECONDS
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGCONT)
        while self._pids and time.monotonic() < deadline:
            self._selector.select(0.1)
            with suppress(BlockingIOError):
                os.read(self._wake[0], 1 << 16)
            self._collect()
        self._signal_all(signal.SIGKILL)
        while self._pids:
            pid, _ = os.waitpid(-1, 0)
            self._pids.pop(pid, None)

    def _collect(self) -> None:
        while self._pids:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._pids.pop(pid, None)

    def _signal_all(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _spawn(command: Sequence[str], environment: Mapping[str, str], pipe: int) -> int:
    """Start a new interpreter, which dies with this process; return its number."""
    process = subprocess.Popen(
        command,
        env={**environment, PIPE_VARIABLE: str(pipe)},
        pass_fds=[pipe],
        preexec_fn=die_with_parent,  # noqa: PLW1509 - the launcher has no threads
    )
    process.returncode = 0  # this module waits for it, not `subprocess`
    return process.pid


class Spare:
    """The warm spare of a host (`checkmate.launch.spare`)."""

    def __init__(self, script: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. It is ready once it has the script's imports."""
        self.is_ready = False
        self.trouble = ""
        """Why there is none, if there is none."""
        self.socket, spare_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with spare_end:
            command = [sys.executable, "-m", "checkmate.launch.spare", str(spare_end.fileno()), *script]
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[spare_end.fileno()],
                preexec_fn=die_with_parent,  # noqa: PLW1509 - the launcher has no threads
            )

    def hear(self) -> bool:
        """Read its first message; return whether it can be used."""
        data = self.socket.recv(MESSAGE_BYTES)
        self.trouble = str(json.loads(data)["trouble"]) if data else "its process has ended"
        self.is_ready = not self.trouble
        return self.is_ready

    def fork(self, environment: Mapping[str, str], pipe: int) -> int | None:
        """Return the number of a new process that runs the script; `None` if there is none."""
        self.socket.settimeout(FORK_SECONDS)
        try:
            socket.send_fds(self.socket, [json.dumps(dict(environment)).encode()], [pipe])
            data = self.socket.recv(MESSAGE_BYTES)
        except OSError as error:
            data, self.trouble = b"", str(error)
        self.is_ready = bool(data)
        return int(json.loads(data)["pid"]) if data else None

    def close(self) -> None:
        """End it."""
        self.socket.close()
        self._process.kill()
        with suppress(ChildProcessError):
            self._process.wait()
