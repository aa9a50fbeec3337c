"""The calibration: what the plugin predicts, and that it sees each byte that differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.nccl.building import shared_object
from checkmate.nccl.library import NcclBucket, NcclCalibration, NcclLibrary
from checkmate.wire.nccl_slicing import NcclSend
from tests.support.nccl.sender import SendingRank, address, buffer

Make = Callable[..., SendingRank]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK = (1 << 64) - 1
BUCKETS = [NcclBucket(address(0), 60_000, 4, 0), NcclBucket(address(1), 70_000, 2, 1)]


@pytest.fixture(scope="module")
def library() -> NcclLibrary:
    nccl_library = NcclLibrary(shared_object())
    nccl_library.set_buckets(
        [NcclBucket(address(i), 1 << 16, size, 0) for i, size in enumerate((1, 2, 4, 8))]
    )
    return nccl_library


def mixed(bucket: int, element: int, itemsize: int) -> int:
    """Return the bits of an element, by the definition."""
    value = ((bucket << 40 ^ element) + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    value = (value ^ value >> 31) & (1 << 8 * itemsize) - 1
    top = 8 * itemsize - 2
    return value & ~(1 << top) | (~value >> top - 1 & 1) << top


@given(number=st.integers(0, 3), first=st.integers(0, (1 << 16) - 10), count=st.integers(0, 10))
def test_elements_are_hashes_of_their_places(
    library: NcclLibrary, number: int, first: int, count: int
) -> None:
    size = 1 << number
    predicted = library.prediction(number, range(first, first + count))
    expected = [mixed(number, element, size) for element in range(first, first + count)]
    assert predicted == b"".join(bits.to_bytes(size, "little") for bits in expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_change_no_bit_of_a_prediction(library: NcclLibrary, dtype: torch.dtype) -> None:
    number = {2: 1, 4: 2, 8: 3}[dtype.itemsize]
    values = torch.frombuffer(library.prediction(number, range(1 << 16)), dtype=dtype)
    assert values.isfinite().all()
    assert (values.abs() >= torch.finfo(dtype).tiny).all()  # GPUs may flush smaller numbers to zero
    total = torch.zeros_like(values) + values + torch.zeros_like(values)
    assert torch.equal(total.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize(
    ("bucket", "elements"),
    [(4, range(1)), (0, range(1 << 16, 1 + (1 << 16))), (0, range(0, 4, 2))],
)
def test_elements_that_a_bucket_lacks(library: NcclLibrary, bucket: int, elements: range) -> None:
    with pytest.raises(ValueError, match=f"bucket {bucket} does not have the elements"):
        library.prediction(bucket, elements)


def contents(sender: SendingRank, number: int) -> Callable[[NcclSend], bytes]:
    """Return the contents of sends in the calibration; partial sums are arbitrary."""

    def contents_of(send: NcclSend) -> bytes:
        right = bytes(sender.library.prediction(number, send.where))
        return right if send.round >= 0 else bytes(len(right))

    return contents_of


def expected(sender: SendingRank, bucket: NcclBucket, channel: int) -> NcclCalibration:
    part = sender.slicing.part(bucket.elements, bucket.itemsize, 2, channel)
    sends = list(sender.slicing.sends(part, bucket.itemsize, sender.ranks, sender.rank))
    reduced = [len(send.where) * bucket.itemsize for send in sends if send.round >= 0]
    return NcclCalibration(len(reduced), sum(reduced), 0)


@pytest.mark.parametrize(("release", "rank"), [("2.26", 0), ("2.28", 1), ("2.30", 2)])
def test_each_fully_reduced_byte_is_compared_and_nothing_is_tagged(
    make: Make, release: str, rank: int
) -> None:
    sender = make(release, rank, 3, 2)
    sender.library.set_buckets(BUCKETS)
    sender.library.calibrate(on=True)
    with sender.library.expected():
        for number, bucket in enumerate(BUCKETS):
            sender.reduce(number, bucket, contents(sender, number))
    sender.library.calibrate(on=False)
    for bucket in BUCKETS:
        for channel in range(2):
            calibrated = sender.library.calibrated(channel, bucket.shadow_id)
            assert calibrated == expected(sender, bucket, channel)
            assert calibrated.nbytes > 10_000
            assert sender.library.count(channel, bucket.shadow_id) == (0, 0)
    sender.reduce(0, BUCKETS[0])  # of arbitrary contents
    assert sender.library.trouble == ""
    assert (sender.library.count(0, 0)[0] > 0) == (rank != 1)


@pytest.mark.parametrize("place", [0, 4095, 4096, -1])
def test_a_byte_that_differs_stops_tagging_and_is_named(make: Make, place: int) -> None:
    sender = make("2.30", 0, 2, 1)
    bucket = NcclBucket(address(0), 100_000, 4, 0)
    sender.library.set_buckets([bucket])
    right, elements = contents(sender, 0), []

    def wrong(send: NcclSend) -> bytes:
        changed_contents = bytearray(right(send))
        if send.round == 0 and send.step % 2 == 0:
            changed_contents[place] ^= 1
            elements.append(send.where[place % len(changed_contents) // 4])
        return bytes(changed_contents)

    sender.library.calibrate(on=True)
    sender.reduce(0, bucket, wrong)
    assert len(elements) == 1
    assert sender.library.calibrated(0, 0).mismatches == 1
    assert f"step 2: element {elements[0]} differs from the prediction" in sender.library.trouble
    sender.library.calibrate(on=True)
    assert sender.library.calibrated(0, 0) == NcclCalibration(0, 0, 0)


def test_a_collective_that_was_launched_in_the_calibration_is_not_tagged_after_it(make: Make) -> None:
    """NCCL's proxy may send after the kernel has ended, and so after the calibration."""
    sender = make("2.30", 0, 2, 1)
    bucket = NcclBucket(address(0), 1000, 4, 0)
    sender.library.set_buckets([bucket])
    sender.library.calibrate(on=True)
    launched, right = sender.caller.coll(address(0), 1000, "ncclFloat32", 1), contents(sender, 0)
    sender.library.calibrate(on=False)
    op = sender.caller.proxy_op(launched, 0, 1)
    for send in sender.slicing.sends(range(1000), 4, 2, 0):
        data = bytearray(right(send))
        step = sender.caller.proxy_step(op, send.step)
        sender.send(0, len(data), step, buffer(data))
    assert sender.library.calibrated(0, 0).nbytes == 2000
    assert sender.library.count(0, 0) == (0, 0)
