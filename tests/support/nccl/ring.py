"""NCCL's ring AllReduce on CPU tensors, in the SIMPLE protocol: what each rank sends, with its contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from checkmate.wire.nccl_slicing import NcclSend, NcclSlicing


@dataclass(frozen=True)
class RingChannel:
    """One rank's part in AllReduces on a channel, which carries the elements `part` of a bucket."""

    slicing: NcclSlicing
    part: range
    ranks: int
    rank: int

    def run(
        self, tensor: torch.Tensor, receive: Callable[[NcclSend], torch.Tensor]
    ) -> Iterator[tuple[NcclSend, torch.Tensor]]:
        """Sum `tensor` in place over all ranks. Yield each send and its contents, in order.

        `receive` returns the contents of the previous rank's next send, which it is given.
        """
        coming = self._sends(tensor, self.rank - 1)
        loop = 2 * (self.ranks - 1) * self.slicing.slices
        for send in self._sends(tensor, self.rank):
            if send.round > 1 - self.ranks:
                self._take(tensor, next(coming), receive)
            yield send, tensor[send.where.start : send.where.stop]
            if send.step % loop == loop - 1:
                for last in islice(coming, self.slicing.slices):
                    self._take(tensor, last, receive)

    def _sends(self, tensor: torch.Tensor, rank: int) -> Iterator[NcclSend]:
        return self.slicing.sends(self.part, tensor.element_size(), self.ranks, rank % self.ranks)

    @staticmethod
    def _take(tensor: torch.Tensor, send: NcclSend, receive: Callable[[NcclSend], torch.Tensor]) -> None:
        part = tensor[send.where.start : send.where.stop]
        if send.round < 0:  # a partial sum
            part += receive(send)
        else:
            part.copy_(receive(send))
