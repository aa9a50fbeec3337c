"""Creates what has NCCL reduce and tag gradients, on all ranks together.

Before gradients are tagged, `calibrate` compares what NCCL sends with what the layout foresees.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

import torch

from checkmate.keys.access import access
from checkmate.keys.errors import KeysError
from checkmate.keys.roles import Role, Secret
from checkmate.nccl.building import PluginError, shared_object
from checkmate.nccl.environment import environment_troubles, settings, version_trouble
from checkmate.nccl.interfaces import interface_of, speed_of
from checkmate.nccl.library import NcclBucket, NcclLibrary, NcclPlace
from checkmate.ring.place import RingError
from checkmate.tagger import Tagger, TaggerUnavailable
from checkmate.training.errors import SessionError
from checkmate.training.gradients.nccl_reducer import NcclReducer
from checkmate.training.start import exchange, nccl_runtime
from checkmate.training.start.nccl_runtime import Communicator
from checkmate.training.start.places import Place, Start
from checkmate.training.start.survivor import Survivor
from checkmate.wire.layout import Layout
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.schedule import stream_layout

_PIECE: Final = 1 << 20
"""Elements that are predicted at once."""
_SECONDS: Final = 10.0
"""Seconds that the last sends may take after the device is done."""
_POLL_SECONDS: Final = 0.001

ComparedBytes = dict[tuple[int, int], int]
"""Bytes of fully reduced sends, by channel and shadow id."""


@dataclass
class NcclMaker:
    """Makes a rank's reducer step by step. Each step's troubles are those of all ranks."""

    place: Place
    layout: Layout
    start: Start
    device: torch.device
    undo: ExitStack
    required: bool
    average: bool = True
    library: NcclLibrary | None = None
    tagger: Tagger | None = None
    troubles: list[str] = field(default_factory=list)
    """Troubles of all ranks; if there is one, no rank tags."""
    _reducer: NcclReducer | None = None

    def make(self) -> NcclReducer:
        """Return the reducer. Gradients are tagged if `troubles` is empty afterwards.

        Raises:
            SessionError: On all ranks, if one of them can't tag, and tagging is required.
            RingError: NCCL can't connect the ranks.
        """
        self._agree(self._prepare())
        if self.library is None or self.troubles:
            self._reducer = self._with(self._open(), None)
        else:
            self._reducer = self._calibrated(self.library)
        Tagger.give_up_capabilities()
        return self._reducer

    def _agree(self, trouble: str) -> None:
        """Note the troubles of all ranks. Raise `SessionError` on all if tagging is required."""
        message: Any = exchange.shortened(f"{self.place.name}: {trouble}") if trouble else None
        messages = exchange.gather(message, name_of=self.place.name_of)
        self.troubles += [str(message) for message in messages if message]
        if self.troubles and self.required:
            raise SessionError(f"gradients can't be tagged: {self.troubles[0]}")

    def _prepare(self) -> str:
        """Load the plugin, and attach the tagger on boundary ranks. Return why that is impossible, or ""."""
        version, channels = nccl_runtime.runtime.version(), self.place.job.channels
        try:
            plugin, missing = shared_object(), ""
        except PluginError as error:
            plugin, missing = Path(), str(error)
        setup = [*version, self.layout.fingerprint.hex(), plugin.name]
        setups = exchange.gather(setup, name_of=self.place.name_of)
        if trouble := version_trouble(version) or missing or self._difference(setups):
            return trouble
        try:
            trouble = next(environment_troubles(os.environ, plugin, channels), "")
            if trouble:
                return trouble
            addresses = [IPv4Address(ip) for ip in self.place.ips]
            interface = interface_of(addresses[self.place.position])
            library = NcclLibrary(plugin)
            key = access(self.place.job, Role.TRAINER).secret(Secret.RING)
            if self.place.side is not None:
                self.tagger = self.undo.enter_context(Tagger.attach(stays=Survivor.is_wanted))
        except (KeysError, PluginError, ValueError, OSError) as error:
            return str(error)
        except TaggerUnavailable as error:
            return f"{error.missing}; {error.remedy}"
        assert isinstance(self.layout.slicing, NcclSlicing)
        library.begin(
            NcclPlace(
                self.place.position,
                self.place.ranks,
                addresses[self.place.position],
                interface,
                speed_of(interface),
                peers=addresses,
                key=key,
            ),
            channels=channels,
            slicing=self.layout.slicing,
            incarnation=self.start.plan.incarnation,
            sockets_map=-1 if self.tagger is None else self.tagger.sockets_map,
            dscp_bit=self.place.job.tag.dscp_bit,
        )
        os.environ.update(settings() | dict(os.environ))
        self.undo.callback(library.stop, "training has ended")
        self.library = library
        return ""

    def _difference(self, setups: list[Any]) -> str:
        """Return which rank of this group has another NCCL, model or plugin than the first, or ""."""
        ranks = [rank.rank for rank in self.place.job.dp_groups[self.place.group].ranks]
        first = setups[ranks[0]]
        for rank in ranks:
            setup = setups[rank]
            if setup[:3] != first[:3]:
                names = [
                    f"{self.place.name_of(r)} has {_dotted(v)}" for r, v in ((ranks[0], first), (rank, setup))
                ]
                return f"versions of NCCL differ: {', '.join(names)}; install the same on all hosts"
            if setup[3] != first[3]:
                return f"{self.place.name_of(rank)} has another model, or another NCCL_BUFFSIZE"
            if setup[4] != first[4] and setup[4] and first[4]:
                return (
                    f"{self.place.name_of(rank)} has another Checkmate: install the same version on all hosts"
                )
        return ""

    def _open(self) -> Communicator:
        try:
            communicator = nccl_runtime.runtime.open(self.place, self.device)
        except RuntimeError as error:
            raise RingError(f"{self.place.name}: NCCL can't connect the ranks: {error}") from error
        self.undo.callback(self._close, communicator)
        return communicator

    def _close(self, communicator: Communicator) -> None:
        """Close the communicator; abort it first if other ranks may not come to its end."""
        if self._reducer is None or self._reducer.failed:
            communicator.abort()
        communicator.close()

    def _with(self, communicator: Communicator, tags: NcclLibrary | None) -> NcclReducer:
        streams = dict(self._streams()) if tags is not None and self.place.side is not None else {}
        return NcclReducer(
            self.layout,
            communicator,
            tags,
            streams,
            self.place.name,
            first_id=self.place.first_id,
            required=self.required,
            average=self.average,
            tagger=self.tagger,
        )

    def _calibrated(self, library: NcclLibrary) -> NcclReducer:
        """Return the reducer that tags, unless the calibration shows that tags would be wrong."""
        with library.expected():
            self._reducer = reducer = self._with(self._open(), library)
            trouble = self._name_buckets(library, reducer)
            self._agree(trouble or calibrate(self.place, self.layout, library, reducer))
        if self.troubles:
            library.stop(self.troubles[0])
            reducer.leave_untagged()
        return reducer

    def _name_buckets(self, library: NcclLibrary, reducer: NcclReducer) -> str:
        """Tell the plugin the buckets. Return why it does not take them, or ""."""
        first_id = self.place.first_id
        try:
            library.set_buckets(
                [
                    NcclBucket(
                        tensor.data_ptr(), bucket.elements, bucket.itemsize, first_id + bucket.shadow_id
                    )
                    for tensor, bucket in zip(reducer.tensors, self.layout.schedule, strict=True)
                ]
            )
        except ValueError as error:
            return f"{error}: give DDP a larger bucket_cap_mb"
        return ""

    def _streams(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield this rank's streams, by channel and shard, with their bytes in each iteration."""
        side = self.place.side
        assert side is not None
        for channel in range(self.place.job.channels):
            for shard in sorted({bucket.shadow_id for bucket in self.layout.schedule}):
                stream = stream_layout(
                    self.layout.schedule,
                    self.place.job.channels,
                    channel,
                    self.place.ranks,
                    side=side,
                    shadow_id=shard,
                    slicing=self.layout.slicing,
                )
                yield (channel, shard), stream.nbytes


def _dotted(version: list[Any]) -> str:
    return ".".join(map(str, version[:3]))


def calibrate(place: Place, layout: Layout, library: NcclLibrary, reducer: NcclReducer) -> str:
    """Reduce each bucket once with known values. Return why tags would be wrong, or "". All ranks call it.

    The group's first rank has values that follow from bucket and element, the others have zeros, and their
    sum is compared by the plugin in every send that is fully reduced. Buckets are zero afterwards.
    """
    library.calibrate(on=True)
    try:
        for index, tensor in enumerate(reducer.tensors):
            if place.first:
                _fill(tensor, library, index)
            reducer.communicator.all_reduce(tensor, average=False)
        reducer.communicator.synchronize()
        trouble = _await_sends(library, foreseen_bytes(place, layout))
    except RuntimeError as error:
        trouble = f"NCCL: {error}"
    finally:
        library.calibrate(on=False)
    for tensor in reducer.tensors:
        tensor.zero_()
    return trouble


def foreseen_bytes(place: Place, layout: Layout) -> ComparedBytes:
    """Return what this rank sends fully reduced, as the layout's slicing has it."""
    slicing = layout.slicing
    assert isinstance(slicing, NcclSlicing)
    nbytes: ComparedBytes = Counter()
    for bucket in layout.schedule:
        for channel in range(place.job.channels):
            part = slicing.part(bucket.elements, bucket.itemsize, place.job.channels, channel)
            for send in slicing.sends(part, bucket.itemsize, place.ranks, place.position):
                if send.round >= 0:
                    nbytes[channel, place.first_id + bucket.shadow_id] += len(send.where) * bucket.itemsize
    return nbytes


def compared_bytes(library: NcclLibrary, streams: ComparedBytes) -> ComparedBytes:
    """Return what the plugin has compared so far."""
    return {stream: library.calibrated(*stream).nbytes for stream in streams}


def _fill(tensor: torch.Tensor, library: NcclLibrary, index: int) -> None:
    for start in range(0, len(tensor), _PIECE):
        piece = tensor[start : start + _PIECE]
        predicted = library.prediction(index, range(start, start + len(piece)))
        piece.copy_(torch.frombuffer(predicted, dtype=tensor.dtype))


def _await_sends(library: NcclLibrary, expected: ComparedBytes) -> str:
    """Wait until all expected bytes are compared. A device is done before its last send has left."""
    deadline = time.monotonic() + _SECONDS
    while not library.trouble and compared_bytes(library, expected) != expected:
        if not library.used_channels(0):
            return (
                "NCCL has not loaded the plugin, because it made its first communicator without it: run "
                'eval "$(checkmate nccl build)" before torchrun'
            )
        if time.monotonic() > deadline:
            nbytes, total = sum(compared_bytes(library, expected).values()), sum(expected.values())
            return f"NCCL has sent {nbytes} bytes of fully reduced data through the plugin, and not {total}"
        time.sleep(_POLL_SECONDS)
    return library.trouble
