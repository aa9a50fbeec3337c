"""The tagger's program, attached to a cgroup until this process closes it, and its structures in tagger.h."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import socket
import struct
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Final

from checkmate.base.privileges import Capability, give_up
from checkmate.tagger import cgroups
from checkmate.tagger.errors import TaggerError, TaggerUnavailable
from checkmate.tagger.libbpf import REQUIRED, BpfObject, object_file

PROGRAM = "checkmate_tagger"
RANGES = 256
"""TAGGER_RANGES: the number of chunks of one socket that may be announced and not acknowledged."""
FAULTS: Final = {
    "reserve": "had no room for a tag",
    "store": "refused a tag",
    "tos": "kept another DSCP bit",
    "flags": "are of connections that the kernel does not show to the tagger",
}
"""Names of `enum fault`, in its order, and what became of the segments that it counts."""
_log: Final = logging.getLogger("checkmate")


class Range(ctypes.Structure):
    """struct tag_range."""

    _fields_ = (
        ("anchor", ctypes.c_uint32),
        ("length", ctypes.c_uint32),
        ("sequence", ctypes.c_uint32),
        ("shadow_id", ctypes.c_uint16),
        ("channel", ctypes.c_uint8),
        ("incarnation", ctypes.c_uint8),
    )


class SocketState(ctypes.Structure):
    """struct tagged_socket."""

    _fields_ = (
        ("established", ctypes.c_uint32),
        ("first_sequence", ctypes.c_uint32),
        ("plain_tos", ctypes.c_uint32),
        ("tagged_tos", ctypes.c_uint32),
        ("head", ctypes.c_uint32),
        ("tail", ctypes.c_uint32),
        ("ranges", Range * RANGES),
    )

    def set_range(self, number: int, *values: int) -> None:
        """Set the fields of a range, in their order, at once: it happens for each chunk."""
        _RANGE.pack_into(self, _FIRST_RANGE + number % RANGES * _RANGE.size, *values)


_RANGE: Final = struct.Struct("=IIIHBB")
_FIRST_RANGE: Final = SocketState.ranges.offset


class Tagger(AbstractContextManager["Tagger"]):
    """The attached program. It is a context manager, and detaches also if the process dies.

    Sockets must be created in the cgroup, and prepared by `TaggedSocket` before they connect.
    """

    def __init__(self, loaded: BpfObject) -> None:
        self._object: BpfObject | None = loaded
        self._sockets = loaded.map_descriptor("sockets", ctypes.sizeof(SocketState))
        self._faults = loaded.map_descriptor("faults", ctypes.sizeof(ctypes.c_uint64))
        self._warned = 0

    _resident: ClassVar[Tagger | None] = None
    """The one that stays."""

    @classmethod
    def attach(cls, *, stays: bool = False) -> Tagger:
        """Load the program and attach it to this process's cgroup (v2).

        Args:
            stays: Whether the end of its block leaves it attached, and the next such call returns it: the
                capabilities that it takes may be given up after the first.

        Raises:
            TaggerUnavailable: The kernel or privileges do not suffice, or clang or libbpf is missing.
        """
        if stays and cls._resident is not None:
            return cls._resident
        if sys.platform != "linux":
            raise TaggerUnavailable(f"{sys.platform} has no eBPF", "run it on Linux")
        loaded = BpfObject(object_file())
        try:
            directory = cgroups.open_own_cgroup()
            try:
                loaded.attach(PROGRAM, directory)
            finally:
                os.close(directory)
            tagger = cls(loaded)
        except BaseException:
            loaded.close()
            raise
        if stays:
            cls._resident = tagger
        return tagger

    @property
    def program_id(self) -> int:
        """The kernel's id of the program, as bpftool shows it."""
        descriptor = self._loaded.program_descriptor(PROGRAM)
        for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "prog_id":
                return int(value)
        raise TaggerError("the kernel does not report the program's id")

    @property
    def sockets_map(self) -> int:
        """The file descriptor of the map of sockets, for a library that announces ranges itself."""
        if self._object is None:
            raise TaggerError("the tagger is closed")
        return self._sockets

    def faults(self) -> dict[str, int]:
        """Return the number of segments sent with errors, by reason. All are 0 unless there is a bug."""
        counts = {}
        for index, name in enumerate(FAULTS):
            value = ctypes.c_uint64()
            self._loaded.lookup(self._faults, ctypes.c_int(index), value)
            counts[name] = value.value
        return counts

    def warn_of_faults(self, name: str) -> None:
        """Log faults: the first, and then whenever there are ten times as many. `name`: this rank's."""
        if self._object is None:
            return
        faults = {fault: count for fault, count in self.faults().items() if count}
        total = sum(faults.values())
        if total and total >= 10 * self._warned:
            self._warned = total
            words = ", ".join(f"{count:,} {FAULTS[fault]}" for fault, count in faults.items())
            _log.warning(
                "%s: segments were sent otherwise than the tagger asked: %s. Shadow nodes miss what was not "
                "tagged",
                name,
                words,
            )

    @staticmethod
    def give_up_capabilities() -> None:
        """Give up, in this thread, what `attach` needs, unless the user is root."""
        if os.geteuid():
            later = (
                set() if kernel_version(os.uname().release) >= (5, 19) else {Capability.BPF}
            )  # to announce ranges
            give_up(*(capability for capability in REQUIRED if capability not in later))

    def store(self, sock: socket.socket, state: SocketState) -> None:
        """Pass a socket's complete state to the kernel, atomically."""
        self._loaded.update(self._sockets, ctypes.c_int(sock.fileno()), state)

    def fetch(self, sock: socket.socket, state: SocketState) -> None:
        """Read a socket's state back from the kernel."""
        self._loaded.lookup(self._sockets, ctypes.c_int(sock.fileno()), state)

    def close(self) -> None:
        """Detach and unload. Bytes not sent yet are sent untagged. Calling it again has no effect."""
        if self._object is not None:
            self._object.close()
            self._object = None

    def __exit__(self, *_: object) -> None:
        if self is not Tagger._resident:
            self.close()

    @property
    def _loaded(self) -> BpfObject:
        if self._object is None:
            raise TaggerError("the tagger is closed")
        return self._object


def kernel_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a kernel's release, such as `6.1.0-13-amd64`."""
    major, minor, *_ = release.split(".")
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)))
