"""Variables with which NCCL loads the plugin, those against it, and what versions and addresses determine."""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path

import pytest

from checkmate.nccl.building import SONAME
from checkmate.nccl.environment import environment_troubles, settings, slicing_of, variables, version_trouble
from checkmate.nccl.interfaces import interface_of, speed_of
from checkmate.wire.nccl_slicing import NcclSlicing

PLUGIN = Path("/cache/libnccl-net-checkmate-1.so")


@pytest.mark.parametrize("environ", [{}, settings(), variables(PLUGIN), {"NCCL_DEBUG": "INFO"}])
def test_what_the_plugin_needs_is_no_trouble(environ: dict[str, str]) -> None:
    assert list(environment_troubles(environ, PLUGIN, 2)) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_NET", "IB", "NCCL_NET is IB, so NCCL uses no plugin: unset it"),
        (
            "NCCL_NET_PLUGIN",
            "none",
            "NCCL_NET_PLUGIN is none, and NCCL loads one network in a",
        ),
        (
            "NCCL_PROFILER_PLUGIN",
            "/x/lib.so",
            "NCCL_PROFILER_PLUGIN is /x/lib.so, and NCCL loads one pro",
        ),
        ("NCCL_ALGO", "Tree", "NCCL_ALGO is Tree, which excludes ring: unset it"),
        ("NCCL_ALGO", "^Ring", "NCCL_ALGO is ^Ring, which excludes ring"),
        ("NCCL_ALGO", "allreduce:tree;broadcast:ring", "which excludes ring"),
        ("NCCL_PROTO", "LL,LL128", "NCCL_PROTO is LL,LL128, which excludes simple"),
        ("NCCL_MAX_NCHANNELS", "1", "NCCL_MAX_NCHANNELS is 1, but the job has channels: 2: unset it"),
        ("NCCL_MIN_CTAS", "4", "NCCL_MIN_CTAS is 4, but the job has channels: 2"),
    ],
)
def test_what_stands_against_the_plugin_is_named(name: str, value: str, words: str) -> None:
    (trouble,) = environment_troubles({**settings(), name: value}, PLUGIN, 2)
    assert words in trouble


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_NET", "checkmate"),
        ("NCCL_ALGO", "Ring,Tree"),
        ("NCCL_ALGO", "^NVLS"),
        ("NCCL_ALGO", "allreduce:ring;allgather:pat"),
        ("NCCL_ALGO", "broadcast:tree"),
        ("NCCL_PROTO", "SIMPLE"),
        ("NCCL_MAX_NCHANNELS", "2"),
        ("NCCL_MAX_NCHANNELS", "8"),
        ("NCCL_MIN_NCHANNELS", "2"),
    ],
)
def test_what_allows_the_ring_is_no_trouble(name: str, value: str) -> None:
    assert list(environment_troubles({name: value}, PLUGIN, 2)) == []


def test_versions_determine_cells_and_the_environment_the_buffer() -> None:
    assert slicing_of((2, 29, 7), {}) == slicing_of((2, 30, 3), {}) == NcclSlicing(16 << 10, 4 << 20)
    assert slicing_of((2, 28, 9), {"NCCL_BUFFSIZE": "1048576"}) == NcclSlicing(8 << 10, 1 << 20)
    for text in ("4M", "1000", "65537"):
        with pytest.raises(ValueError, match=f"NCCL_BUFFSIZE is {text}: unset it, or set a multiple"):
            slicing_of((2, 29, 7), {"NCCL_BUFFSIZE": text})


def test_versions_that_are_not_supported_are_named() -> None:
    assert [version_trouble(version) for version in ((2, 26, 2), (2, 28, 9), (2, 30, 7))] == ["", "", ""]
    assert version_trouble((2, 25, 1)).startswith("NCCL 2.25.1 is not supported, but 2.26 to 2.30 are")
    assert version_trouble((2, 31, 0)).startswith("NCCL 2.31.0 is not supported")


def test_processes_that_load_the_plugin_need_its_name_and_others_its_path() -> None:
    assert set(settings()) == set(variables(PLUGIN))
    assert settings()["NCCL_NET_PLUGIN"] == SONAME
    assert variables(PLUGIN)["NCCL_TUNER_PLUGIN"] == str(PLUGIN)


def test_an_address_has_an_interface() -> None:
    assert interface_of(IPv4Address("127.0.0.1")) == interface_of(IPv4Address("127.8.9.1")) == "lo"
    assert speed_of("lo") == speed_of("no-such-interface") == 0
    with pytest.raises(ValueError, match=r"no interface of this host has the address 203\.0\.113\.77"):
        interface_of(IPv4Address("203.0.113.77"))
