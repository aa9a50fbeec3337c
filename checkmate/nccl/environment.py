"""The environment variables with which NCCL loads the plugin, and those that stand against it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from checkmate.nccl.building import SONAME
from checkmate.wire.nccl_slicing import NcclSlicing

Version = tuple[int, int, int]

NAME: Final = "Checkmate"
"""The network's name for NCCL."""
OLDEST: Final = (2, 26)
NEWEST: Final = (2, 30)
_PLUGINS: Final = {
    "NCCL_NET_PLUGIN": "network",
    "NCCL_PROFILER_PLUGIN": "profiler",
    "NCCL_TUNER_PLUGIN": "tuner",
}
_LIMITS: Final = (
    ("NCCL_MAX_NCHANNELS", -1),
    ("NCCL_MAX_CTAS", -1),
    ("NCCL_MIN_NCHANNELS", 1),
    ("NCCL_MIN_CTAS", 1),
)
_BUFFER: Final = "NCCL_BUFFSIZE"
_LARGE_CELLS: Final = (2, 29)
"""The first version that shares out cells of 16 KiB; they had 8 before."""


def settings() -> dict[str, str]:
    """Return the environment that NCCL needs before it makes its first communicator in the process.

    The name stands for the library that the process has loaded, because NCCL 2.27.3 takes no path. The count
    exceeds that of refused communicators: NCCL 2.28.3 to 2.29 forgets a plugin once it has counted down to 0.
    """
    return dict.fromkeys(_PLUGINS, SONAME) | {"NCCL_NET_PLUGIN_REF_COUNT": "1000000"}


def variables(plugin: Path) -> dict[str, str]:
    """Return the variables with which NCCL loads the plugin in processes that begin with them.

    They have its path, which NCCL 2.27.0 to 2.27.4 do not take. `settings` has those of a process that
    has loaded the plugin itself, and makes its first communicator after that.
    """
    return settings() | dict.fromkeys(_PLUGINS, str(plugin))


def slicing_of(version: Version, environ: Mapping[str, str]) -> NcclSlicing:
    """Return the slicing of this version of NCCL. Raise `ValueError` if NCCL_BUFFSIZE is not supported."""
    cell = (16 if version >= _LARGE_CELLS else 8) << 10
    text = environ.get(_BUFFER)
    if text is None:
        return NcclSlicing(cell)
    try:
        return NcclSlicing(cell, int(text))
    except ValueError:
        raise ValueError(
            f"{_BUFFER} is {text}: unset it, or set a multiple of 16 bytes from 65536 on"
        ) from None


def version_trouble(version: Version) -> str:
    """Return why a version of NCCL is not supported, or ""."""
    if OLDEST <= version[:2] <= NEWEST:
        return ""
    versions = " to ".join(".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
    return f"NCCL {'.'.join(map(str, version))} is not supported, but {versions} are (PyTorch 2.7 to 2.13)"


def environment_troubles(environ: Mapping[str, str], plugin: Path, channels: int) -> Iterator[str]:
    """Yield what in the environment stands against the plugin, each with its remedy.

    Args:
        environ: The environment.
        plugin: The plugin's file.
        channels: The job's number of channels.
    """
    net = environ.get("NCCL_NET", NAME)
    if net.lower() != NAME.lower():
        yield f"NCCL_NET is {net}, so NCCL uses no plugin: unset it"
    for name, purpose in _PLUGINS.items():
        value = environ.get(name, SONAME)
        if value not in (SONAME, str(plugin)):
            yield f"{name} is {value}, and NCCL loads one {purpose} in a process: unset it"
    for name, required in (("NCCL_ALGO", "ring"), ("NCCL_PROTO", "simple")):
        allowed = environ.get(name)
        if allowed and not _allows(allowed, required):
            yield f"{name} is {allowed}, which excludes {required}: unset it"
    for name, sign in _LIMITS:
        limit = environ.get(name, "")
        if limit.isdecimal() and sign * (int(limit) - channels) > 0:
            yield f"{name} is {limit}, but the job has channels: {channels}: unset it"


def _allows(value: str, required: str) -> bool:
    """Return whether a list of algorithms or protocols, as in NCCL_ALGO, allows one for AllReduce.

    It may have a list for each function, such as `allreduce:tree,ring;broadcast:ring`, and `^` excludes.
    """
    for part in value.lower().split(";"):
        function, colon, names = part.strip().rpartition(":")
        if colon and function.strip() != "allreduce":
            continue
        choices = {name.strip() for name in names.removeprefix("^").split(",")}
        return (required in choices) != names.startswith("^")
    return True
