"""Capabilities of the process (capabilities(7)): those that it needs later stay, all others are given up."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection

# From linux/capability.h and linux/prctl.h.
CAP_SETPCAP = 8
CAP_NET_BIND_SERVICE = 10
CAP_NET_ADMIN = 12
CAP_NET_RAW = 13
_VERSION_3 = 0x20080522
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_ALL = 64


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Set(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def keep(capabilities: Collection[int]) -> None:
    """Keep only these capabilities, if there, and let no program that is executed gain others.

    This applies to this thread and those that it starts, so call it before there are others. Raise `OSError`
    if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), (_Set * 2)()
    _check(libc.capget(ctypes.byref(header), sets))
    if sets[0].effective >> CAP_SETPCAP & 1:
        for capability in set(range(_ALL)) - set(capabilities):
            if libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
                _check(libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0))
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    mask = sum(1 << capability for capability in capabilities)
    for part, capability_set in enumerate(sets):
        capability_set.permitted &= mask >> 32 * part
        capability_set.effective, capability_set.inheritable = capability_set.permitted, 0
    _check(libc.capset(ctypes.byref(header), sets))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
