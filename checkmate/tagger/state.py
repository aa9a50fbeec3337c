"""The structures of tagger.h that the program shares with user space."""

from __future__ import annotations

import ctypes

RANGES = 256
"""TAGGER_RANGES: the number of chunks of one socket that may be unacknowledged."""
FAULTS = ("reserve", "store", "tos", "flags")
"""Names of `enum fault`, in its order."""


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
