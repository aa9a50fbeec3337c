"""What is read of the plugin once tagging has failed, and where DP groups share addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkmate.ring.place import RingError
from checkmate.training.gradients.nccl_check import _compared_channels
from checkmate.training.gradients.nccl_reducer import NcclReducer
from checkmate.wire.layout import make_layout
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.parameter import Parameter

LAYOUT = make_layout([Parameter("p", (10,), "float32")], 1, slicing=NcclSlicing())


class Silent:
    """A communicator of NCCL 2.26 or 2.27: it reports no error of the network."""

    device, stream = torch.device("cpu"), None

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None: ...
    def abort(self) -> None: ...


class Broken:
    trouble, broken = (
        "calibration: ...",
        "the connection of rank 0 to 10.0.0.2 broke: Connection reset by peer",
    )

    def count(self, channel: int, shadow_id: int) -> tuple[int, int]:
        return 0, 0


def test_a_connection_that_broke_is_an_error_without_tags_too() -> None:
    """It is the plugin's still, and NCCL 2.26 and 2.27 give wrong sums without an error."""
    reducer = NcclReducer(LAYOUT, Silent(), Broken(), {}, "rank 0")  # type: ignore[arg-type]
    reducer.open(lambda index: None, lambda error: None)
    reducer.leave_untagged()
    with pytest.raises(RingError, match="reset by peer"):
        reducer.submit(0)


def test_the_check_reads_what_was_compared_for_a_group_that_shares_its_addresses() -> None:
    """Its shadow ids begin with `first_id`, under which the plugin counts."""
    comparisons = {(0, 1): (7, 700, 1)}

    def calibrated(channel: int, shadow_id: int) -> Any:
        sends, nbytes, mismatches = comparisons.get((channel, shadow_id), (0, 0, 0))
        return SimpleNamespace(sends=sends, nbytes=nbytes, mismatches=mismatches)

    place = SimpleNamespace(first_id=1, job=SimpleNamespace(channels=1))
    maker: Any = SimpleNamespace(place=place, library=SimpleNamespace(calibrated=calibrated))
    (compared,) = _compared_channels(maker, LAYOUT)
    assert (compared.sends, compared.nbytes, compared.mismatches) == (7, 700, 1)
