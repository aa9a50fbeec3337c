"""The NCCL plugin's functions for Python. NCCL loads the same file, so both have the same library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.tag import DEFAULT_DSCP_BIT

_TROUBLE_MAX: Final = 512


class _Job(ctypes.Structure):
    """`struct nccl_job` of plugin/job.h."""

    _fields_ = (
        ("address", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("cell", ctypes.c_uint32),
        ("buffer", ctypes.c_uint32),
        ("incarnation", ctypes.c_uint32),
        ("dscp_bit", ctypes.c_uint32),
        ("sockets_map", ctypes.c_int32),
        ("speed", ctypes.c_int32),
        ("interface", ctypes.c_char * 16),
    )


class _Bucket(ctypes.Structure):
    """`struct nccl_bucket` of plugin/job.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("elements", ctypes.c_uint64),
        ("itemsize", ctypes.c_uint32),
        ("shadow_id", ctypes.c_uint32),
        ("allowed", ctypes.c_uint32),
        ("used", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class NcclPlace:
    """A rank's place in the ring, and its NIC."""

    rank: int
    ranks: int
    address: IPv4Address
    interface: str
    speed: int = 0
    """Of the NIC, in Mbit/s; 0 if unknown."""


@dataclass(frozen=True)
class NcclBucket:
    """A bucket of gradients: the address of its tensor, its size, and the shard of its parameters."""

    address: int
    elements: int
    itemsize: int
    shadow_id: int
    allowed: int = 0
    """Channels that NCCL may use for it; 0 for all, which the plugin's tuner ensures."""


class NcclLibrary:
    """The plugin in this process. It has one job."""

    def __init__(self, path: Path) -> None:
        """Load the plugin's file."""
        self._library = ctypes.CDLL(str(path))
        self._library.checkmate_nccl_trouble.restype = ctypes.c_uint32
        self._library.checkmate_nccl_used.restype = ctypes.c_uint32

    def begin(
        self,
        place: NcclPlace,
        *,
        channels: int,
        slicing: NcclSlicing,
        incarnation: int,
        sockets_map: int = -1,
        dscp_bit: int = DEFAULT_DSCP_BIT,
    ) -> None:
        """Begin with a job, in place of an earlier one.

        Args:
            place: The rank's place.
            channels: The communicator's number of channels.
            slicing: NCCL's slicing.
            incarnation: The start of training, in tags.
            sockets_map: File descriptor of the tagger's map of sockets; -1 to tag nothing.
            dscp_bit: The DSCP bit of tagged segments.
        """
        given = _Job(
            address=int.from_bytes(place.address.packed, sys.byteorder),
            ranks=place.ranks,
            rank=place.rank,
            channels=channels,
            cell=slicing.cell,
            buffer=slicing.buffer,
            incarnation=incarnation,
            dscp_bit=dscp_bit,
            sockets_map=sockets_map,
            speed=place.speed,
            interface=place.interface.encode()[:15],
        )
        self._library.checkmate_nccl_begin(ctypes.byref(given))

    def set_buckets(self, buckets: Sequence[NcclBucket]) -> None:
        """Set the buckets, whose AllReduces are tagged. Raise `ValueError` if they are too many."""
        made = [_Bucket(b.address, b.elements, b.itemsize, b.shadow_id, b.allowed) for b in buckets]
        if self._library.checkmate_nccl_buckets((_Bucket * len(made))(*made), len(made)):
            raise ValueError(f"{len(made)} buckets are too many for the NCCL plugin")

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Announce that the communicator of gradients is created in the block, and no other.

        NCCL 2.26 names it only in collectives, so the block must have the first of them, too.
        """
        self._library.checkmate_nccl_expect(1)
        try:
            yield
        finally:
            self._library.checkmate_nccl_expect(0)

    def used(self, bucket: int) -> int:
        """Return the number of channels that carry a bucket; 0 if no AllReduce has shown it yet."""
        return int(self._library.checkmate_nccl_used(bucket))

    def stop(self, why: str) -> None:
        """Stop tagging for good. The first reason is kept."""
        self._library.checkmate_nccl_stop(why.encode())

    @property
    def trouble(self) -> str:
        """Why tagging has stopped; empty if it has not."""
        text = ctypes.create_string_buffer(_TROUBLE_MAX)
        self._library.checkmate_nccl_trouble(text, _TROUBLE_MAX)
        return text.value.decode(errors="replace")

    def count(self, channel: int, shadow_id: int) -> tuple[int, int]:
        """Return the bytes of a stream that were tagged, and of those what the peer has acknowledged."""
        tagged, acknowledged = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.checkmate_nccl_count(
            channel, shadow_id, ctypes.byref(tagged), ctypes.byref(acknowledged)
        )
        return tagged.value, acknowledged.value
