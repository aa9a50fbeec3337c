"""The NCCL plugin's functions for Python. NCCL loads the same file, so both have the same library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.tag import CHANNELS_MAX, DEFAULT_DSCP_BIT, NCCL_SHADOW_IDS

_TROUBLE_MAX: Final = 512
_BUCKETS_MAX: Final = 4096
_KEY_BYTES: Final = 16


class NcclSizes(ctypes.Structure):
    """`struct slicing_sizes` of plugin/slicing.h: the parameters of a slicing, in their order."""

    _fields_ = tuple((field.name, ctypes.c_uint32) for field in fields(NcclSlicing))


class _Job(ctypes.Structure):
    """`struct nccl_job` of plugin/job.h."""

    _fields_ = (
        ("address", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("sizes", NcclSizes),
        ("incarnation", ctypes.c_uint32),
        ("dscp_bit", ctypes.c_uint32),
        ("sockets_map", ctypes.c_int32),
        ("speed", ctypes.c_int32),
        ("interface", ctypes.c_char * 16),
        ("key", ctypes.c_ubyte * 16),
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
    peers: Sequence[IPv4Address] = ()
    """Addresses of other ranks. Nobody else is heard by this one."""
    key: bytes = field(default=bytes(32), repr=False)
    """The secret `ring.key`, which both sides of a connection prove to have."""


@dataclass(frozen=True)
class NcclBucket:
    """A bucket of gradients: the address of its tensor, its size, and the shard of its parameters."""

    address: int
    elements: int
    itemsize: int
    shadow_id: int
    allowed: int = 0
    """Channels that NCCL may use for it; 0 for all, which the plugin's tuner ensures."""


@dataclass(frozen=True)
class NcclCalibration:
    """What was compared: fully reduced sends, their bytes, and the sends that differed."""

    sends: int
    nbytes: int
    mismatches: int


def meeting_key(key: bytes) -> bytes:
    """Return the 16 bytes that the plugin makes of `ring.key`, for this use only."""
    return blake2b(key, digest_size=_KEY_BYTES, person=b"checkmate nccl").digest()


class NcclLibrary:
    """The plugin in this process. It has one job."""

    def __init__(self, path: Path) -> None:
        """Load the plugin's file."""
        self._library = ctypes.CDLL(str(path))
        self._library.checkmate_nccl_used.restype = ctypes.c_uint32
        self._itemsizes: list[int] = []

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
        job = _Job(
            address=int.from_bytes(place.address.packed, sys.byteorder),
            ranks=place.ranks,
            rank=place.rank,
            channels=channels,
            sizes=NcclSizes(**asdict(slicing)),
            incarnation=incarnation,
            dscp_bit=dscp_bit,
            sockets_map=sockets_map,
            speed=place.speed,
            interface=place.interface.encode()[:15],
            key=(ctypes.c_ubyte * _KEY_BYTES)(*meeting_key(place.key)),
        )
        if self._library.checkmate_nccl_begin(ctypes.byref(job)):
            if not 0 < channels <= CHANNELS_MAX:
                raise ValueError(f"{channels} channels are more than the {CHANNELS_MAX} of a job, or none")
            raise ValueError(f"the NCCL plugin refuses rank {place.rank} of {place.ranks} with {slicing}")
        peers = [int.from_bytes(peer.packed, sys.byteorder) for peer in dict.fromkeys(place.peers)]
        if self._library.checkmate_nccl_peers((ctypes.c_uint32 * len(peers))(*peers), len(peers)):
            raise ValueError(f"{len(peers)} addresses of ranks are more than the NCCL plugin takes")

    def set_buckets(self, buckets: Sequence[NcclBucket]) -> None:
        """Set the buckets, whose AllReduces are tagged.

        Raises:
            ValueError: They are too many, or a shadow id is too large.
        """
        self._itemsizes = [b.itemsize for b in buckets]
        structures = [_Bucket(b.address, b.elements, b.itemsize, b.shadow_id, b.allowed) for b in buckets]
        if self._library.checkmate_nccl_buckets((_Bucket * len(structures))(*structures), len(structures)):
            most = f"it takes {_BUCKETS_MAX} at most, with shadow ids below {NCCL_SHADOW_IDS}"
            raise ValueError(f"the NCCL plugin refuses {len(structures)} buckets: {most}")

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Announce that the communicator of gradients is created in the block, and no other.

        NCCL 2.26 names it only in collectives, and 2.26 and 2.27 connect with the first of them. So the block
        must have that, too. Communicators that are created outside the block keep another network.
        """
        self._library.checkmate_nccl_expect(1)
        try:
            yield
        finally:
            self._library.checkmate_nccl_expect(0)

    def used_channels(self, bucket: int) -> int:
        """Return the number of channels that carry a bucket; 0 if no AllReduce has shown it yet."""
        return int(self._library.checkmate_nccl_used(bucket))

    def stop(self, why: str) -> None:
        """Stop tagging for good. The first reason is kept."""
        self._library.checkmate_nccl_stop(why.encode())

    @property
    def trouble(self) -> str:
        """Why tagging has stopped; empty if it has not."""
        return self._text(self._library.checkmate_nccl_trouble)

    @property
    def broken(self) -> str:
        """Which connection of the job broke, and why; empty if none did.

        NCCL reports that as an asynchronous error of the communicator. Versions 2.26 and 2.27 do not: there,
        AllReduces hang, or give wrong sums. So the communicator must be aborted.
        """
        return self._text(self._library.checkmate_nccl_broken)

    def calibrate(self, *, on: bool) -> None:
        """Begin the calibration, with all counts 0, or end it. AllReduces launched in between are compared.

        For it, rank 0 has the `prediction` in each bucket, the others have zeros, and the operation is SUM.
        The first send that differs stops tagging.
        """
        self._library.checkmate_nccl_calibrate(on)

    def prediction(self, bucket: int, elements: range) -> bytearray:
        """Return the bytes of a bucket's elements in the calibration. Raise `ValueError` if it lacks them.

        They follow from bucket and element. All floating-point types read normal numbers.
        """
        itemsize = self._itemsizes[bucket] if bucket < len(self._itemsizes) else 1
        prediction = bytearray(len(elements) * itemsize)
        place = (ctypes.c_char * len(prediction)).from_buffer(prediction)
        first, count = ctypes.c_uint64(elements.start), ctypes.c_uint64(len(elements))
        if elements.step != 1 or self._library.checkmate_nccl_predict(bucket, first, count, place):
            raise ValueError(f"bucket {bucket} does not have the elements {elements}")
        return prediction

    def calibrated(self, channel: int, shadow_id: int) -> NcclCalibration:
        """Return what this rank has compared on a channel of a shard since the calibration began."""
        sends, nbytes, mismatches = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        self._library.checkmate_nccl_calibrated(
            channel, shadow_id, ctypes.byref(sends), ctypes.byref(nbytes), ctypes.byref(mismatches)
        )
        return NcclCalibration(sends.value, nbytes.value, mismatches.value)

    @staticmethod
    def _text(function: Callable[[Any, int], int]) -> str:
        text = ctypes.create_string_buffer(_TROUBLE_MAX)
        function(text, _TROUBLE_MAX)
        return text.value.decode(errors="replace")

    def count(self, channel: int, shadow_id: int) -> tuple[int, int]:
        """Return the bytes of a stream that were tagged, and of those what the peer has acknowledged."""
        tagged, acknowledged = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.checkmate_nccl_count(
            channel, shadow_id, ctypes.byref(tagged), ctypes.byref(acknowledged)
        )
        return tagged.value, acknowledged.value
