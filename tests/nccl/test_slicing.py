"""The plugin's slicing in C against that in Python, and sizes at which NCCL rounds, as it was seen to do."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_int, c_uint32, c_uint64
from dataclasses import asdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checkmate.nccl.building import SOURCES
from checkmate.nccl.library import NcclSizes
from checkmate.wire.nccl_slicing import NcclSlicing

SLICING = NcclSlicing()


class Slicing(ctypes.Structure):
    """`struct slicing` of slicing.h."""

    _fields_ = (
        ("elements", c_uint64),
        ("sizes", NcclSizes),
        ("itemsize", c_uint32),
        ("channels", c_uint32),
        ("allowed", c_uint32),
        ("ranks", c_uint32),
        ("index", c_uint32),
    )


class SendStructure(ctypes.Structure):
    """`struct sent` of slicing.h."""

    _fields_ = (("first", c_uint64), ("count", c_uint64), ("round", c_int))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library_file = tmp_path_factory.mktemp("slicing") / "slicing.so"
    flags = ("-std=c11", "-shared", "-fPIC")
    subprocess.run(["cc", *flags, str(SOURCES / "slicing.c"), "-o", str(library_file)], check=True)
    return ctypes.CDLL(str(library_file))


def parts(elements: int, itemsize: int, channels: int, allowed: int = 0) -> list[int]:
    used_channels = SLICING.used_channels(elements, itemsize, channels, allowed)
    slices = [
        SLICING.part(elements, itemsize, channels, channel, allowed) for channel in range(used_channels)
    ]
    assert not SLICING.part(elements, itemsize, channels, used_channels, allowed)
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
    assert slices[-1].stop == elements
    return [len(part) for part in slices]


@pytest.mark.parametrize(
    ("elements", "itemsize", "channels", "allowed", "expected"),
    [
        (131072, 1, 8, 0, [16384] * 8),
        (131073, 1, 8, 0, [16384] * 7 + [16385]),
        (131080, 1, 8, 0, [32768] * 4 + [8]),
        (65537, 2, 8, 0, [8192] * 7 + [8193]),
        (1802240, 2, 8, 5, [360448] * 5),
        (1802241, 2, 8, 5, [360448] * 5 + [1]),
        (1, 4, 8, 0, [1]),
    ],
)
def test_an_excess_that_nccl_rounds_away_goes_to_the_last_channel_or_to_one_more(
    elements: int, itemsize: int, channels: int, allowed: int, expected: list[int]
) -> None:
    assert parts(elements, itemsize, channels, allowed) == expected


@given(
    near=st.tuples(st.integers(0, 40), st.integers(1, 16), st.integers(-3, 3)),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    python=st.sampled_from(
        [
            *(NcclSlicing(cell, buffer) for cell in (8 << 10, 16 << 10) for buffer in (1 << 16, 4 << 20)),
            NcclSlicing(4096, 1 << 18, alignment=64, grain=256, steps=16, chunk_steps=6, slice_steps=2),
            NcclSlicing(buffer=100_000, steps=3, chunk_steps=3, slice_steps=3),
        ]
    ),
    channels=st.integers(1, 8),
    allowed=st.integers(1, 8),
    ranks=st.integers(2, 6),
    index=st.integers(0, 5),
)
@example((1, 8, 1), 1, SLICING, 8, 8, 2, 0)
def test_the_plugin_slices_as_python_does(
    compiled: ctypes.CDLL,
    near: tuple[int, int, int],
    itemsize: int,
    python: NcclSlicing,
    channels: int,
    allowed: int,
    ranks: int,
    index: int,
) -> None:
    elements = max(1, near[0] * near[1] * python.cell // itemsize + near[2])
    allowed, index = min(allowed, channels), min(index, ranks - 1)
    used_channels = python.used_channels(elements, itemsize, channels, allowed)
    sizes = NcclSizes(**asdict(python))
    slicing = Slicing(elements, sizes, itemsize, channels, allowed, ranks, index)
    assert compiled.slicing_used(ctypes.byref(slicing)) == used_channels
    assert (
        sum(
            len(python.part(elements, itemsize, channels, channel, allowed))
            for channel in range(used_channels)
        )
        == elements
    )
    plugin_send = SendStructure()
    for channel in range(used_channels + 1):
        part = python.part(elements, itemsize, channels, channel, allowed)
        step = 0
        for step, send in enumerate(python.sends(part, itemsize, ranks, index), start=1):
            assert (
                compiled.slicing_send(ctypes.byref(slicing), channel, step - 1, ctypes.byref(plugin_send))
                == 0
            )
            assert (plugin_send.count, plugin_send.round) == (len(send.where), send.round)
            assert not plugin_send.count or plugin_send.first == send.where.start
        assert compiled.slicing_send(ctypes.byref(slicing), channel, step, ctypes.byref(plugin_send)) == -1
