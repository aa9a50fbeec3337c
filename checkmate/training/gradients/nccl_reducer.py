"""Has NCCL average gradients, on the device on which they are. The plugin tags what NCCL sends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch

from checkmate.ring.place import RingError
from checkmate.tagger import Tagger
from checkmate.training.gradients.reducer import Ends, zero_buckets
from checkmate.training.gradients.staging import Staging, StreamStaging
from checkmate.training.start.nccl_runtime import Communicator
from checkmate.wire.layout import Layout

_log: Final = logging.getLogger("checkmate")


class Tags(Protocol):
    """The tagged streams, as the plugin counts them."""

    @property
    def trouble(self) -> str:
        """The reason why tagging has stopped; empty if it has not."""

    @property
    def broken(self) -> str:
        """The reason why a connection broke; empty if none did."""

    def count(self, channel: int, shadow_id: int) -> tuple[int, int]:
        """Return a stream's tagged bytes, and those that the next rank has acknowledged."""


class NcclReducer:
    """Reduces the layout's buckets with NCCL, one launch each. Its creator closes the communicator.

    Nothing waits for the device: `submit` queues a launch on the communicator's stream, and `staging` copies
    there, too. So the end of a stream follows from the number of launches, not from what was sent so far.
    """

    repairs = None
    """Sends are the plugin's, and their bytes the device's: nothing is kept to be sent again."""

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        tags: Tags | None,
        streams: Mapping[tuple[int, int], int],
        name: str,
        *,
        first_id: int = 0,
        required: bool = False,
        average: bool = True,
        tagger: Tagger | None = None,
    ) -> None:
        """Allocate buckets on the communicator's device.

        Args:
            layout: The layout.
            communicator: Reduces them.
            tags: The plugin; `None` if it can't be used.
            streams: Bytes in each iteration of the streams that this rank tags, by channel and shard.
            name: This rank's name in messages.
            first_id: The shadow id on the wire of shard 0.
            required: Whether the end of tagging is an error.
            average: Whether sums are divided by the number of ranks.
            tagger: On a rank that tags, what the kernel tags with.
        """
        self.layout = layout
        self.tensors: Sequence[torch.Tensor] = zero_buckets(layout, communicator.device)
        self.communicator: Final = communicator
        self._tags, self._name, self._required, self._average = tags, name, required, average
        self._streams: Mapping[tuple[int, int], int] = streams
        self._first_id, self._tagger = first_id, tagger
        self.failed = False
        """Whether NCCL has failed."""
        self._iterations = 0
        self._has_warned = False
        self._on_done: Callable[[int], None]
        self._on_error: Callable[[RingError], None]

    def leave_untagged(self) -> None:
        """Reduce without tags from now on. Connections are watched nevertheless: they are the plugin's."""
        self._streams, self._has_warned = {}, True

    def staging(self, device: torch.device, on_error: Callable[[Exception], None]) -> Staging:
        """Return what copies gradients on the communicator's stream."""
        stream = self.communicator.stream
        return Staging() if stream is None else StreamStaging(device, stream)

    def open(self, on_done: Callable[[int], None], on_error: Callable[[RingError], None]) -> None:
        """Begin. `on_error` is called if `is_acknowledged` finds a broken connection."""
        self._on_done, self._on_error = on_done, on_error

    def submit(self, index: int) -> None:
        """Launch the next bucket's AllReduce.

        Raises:
            RingError: NCCL has failed, or tagging has ended although it is required.
        """
        if index == 0 and self._tagger is not None:
            self._tagger.warn_of_faults(self._name)
        if self.failed or self._broken():
            raise RingError(f"{self._name}: {self._broken() or 'NCCL has failed before'}")
        if self._required and (trouble := self._trouble()):
            raise RingError(f"{self._name}: gradients are not tagged any more: {trouble}")
        try:
            self.communicator.all_reduce(self.tensors[index], average=self._average)
        except RuntimeError as error:
            self.failed = True
            raise RingError(f"{self._name}: NCCL: {self._broken() or error}") from error
        self._iterations += index == len(self.tensors) - 1
        self._on_done(index)

    def ends(self) -> dict[tuple[int, int], int]:
        """Return the end of each stream after all launches."""
        return {stream: nbytes * self._iterations for stream, nbytes in self._streams.items()}

    def is_acknowledged(self, ends: Ends) -> bool:
        """Return whether the next rank has acknowledged all bytes up to these ends.

        If tagging has stopped, nothing more comes: then shadow nodes notice that bytes are lost. If a
        connection broke, no record may follow, because NCCL 2.26 and 2.27 give wrong sums without an error.
        Then the communicator is aborted, which ends what waits for it.
        """
        if self._tags is None:
            return True
        if broken := self._broken():
            if not self.failed:
                self.failed = True
                self._on_error(RingError(f"{self._name}: {broken}"))
                self.communicator.abort()
            return False
        tags, first_id = self._tags, self._first_id
        is_received = all(
            tags.count(channel, first_id + shard)[1] >= end for (channel, shard), end in ends.items()
        )
        return is_received or bool(self._trouble())

    def give_up(self) -> None:
        """Do nothing: other ranks are NCCL's matter."""

    def close(self) -> None:
        """Do nothing: launches end with the communicator."""

    def _broken(self) -> str:
        return "" if self._tags is None else self._tags.broken

    def _trouble(self) -> str:
        """Return why tagging has stopped, and log it once; "" if it has not."""
        trouble = "" if self._tags is None else self._tags.trouble
        if trouble and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: gradients are not tagged any more: %s. Training continues without new checkpoints",
                self._name,
                trouble,
            )
        return trouble
