"""Messages between ranks over `torch.distributed`: JSON of bounded size, with a version.

Torch's own collectives for objects carry pickled ones, which run code of whoever sends them.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from checkmate.base.wording import counted
from checkmate.training.errors import SessionError

VERSION: Final = 11
"""Version of these messages and of their order. Each change raises it, so that older ranks are named."""
MESSAGE_BYTES: Final = 16 << 20
"""The largest message; the longest are plans, with some bytes per shard."""
_MAGIC: Final = 0xC4EC_0000
_VERSIONS: Final = 0x10000
_HEADER: Final = struct.Struct("=qq")
"""`_MAGIC` and the version; the length of the message in bytes. Ranks of a job have the same byte order."""
_SLOT_BYTES: Final = 4096
"""The first round of each message has this many bytes: the header, and all of a message that fits."""
_ROOM: Final = _SLOT_BYTES - _HEADER.size
_MAX_NAMES: Final = 8
"""Ranks that an error names."""
_MAX_ERROR: Final = 2000
"""Characters of an error of another rank."""


class ExchangeError(SessionError):
    """Another rank sent what this version of Checkmate does not understand. The message names the rank."""


NameOf = Callable[[int], str]
"""Returns a rank's name in messages."""


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks: a process without a process group is alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(message: Any, *, name_of: NameOf = "rank {}".format) -> list[Any]:
    """Return the messages of all ranks, by rank. All ranks call it, in the same order.

    Args:
        message: What JSON can express.
        name_of: Returns a rank's name in errors.

    Raises:
        ExchangeError: On all ranks, if one has another version or a message that is too large.
    """
    data = _encoded(message)
    if not dist.is_initialized():
        return [json.loads(data)]
    _meeting.attend(name_of)
    slots = _gathered(_slot(data))
    sizes = _sizes(dict(enumerate(slots)), name_of)
    parts = [slot[_HEADER.size :] for slot in slots]
    if (longest := max(sizes.values())) > _ROOM:
        parts = _gathered(_padded(data, longest))
    return [_decoded(part[: sizes[rank]], name_of(rank)) for rank, part in enumerate(parts)]


def broadcast(message: Any, source: int, *, name_of: NameOf = "rank {}".format) -> Any:
    """Return the message of one rank. All ranks call it; the others' `message` is not used.

    Args:
        message: What JSON can express.
        source: The global rank that sends.
        name_of: Returns a rank's name in errors.

    Raises:
        ExchangeError: On all ranks, if one has another version or the message is too large.
    """
    rank, _ = rank_and_world()
    data = _encoded(message if rank == source else None)
    if not dist.is_initialized():
        return json.loads(data)
    _meeting.attend(name_of)
    slot = own_slot = _slot(data)
    if rank != source:
        slot = torch.empty_like(own_slot)
    dist.broadcast(slot, src=source)
    size = _sizes({rank: own_slot, source: slot}, name_of)[source]
    part = slot[_HEADER.size :]
    if size > _ROOM:
        part = _padded(data if rank == source else b"", size)
        dist.broadcast(part, src=source)
    return _decoded(part[:size], name_of(source))


def shortened(error: str) -> str:
    """Return an error's text, cut so that it fits into a message."""
    return error if len(error) <= _MAX_ERROR else f"{error[:_MAX_ERROR]}..."


class _Meeting:
    """Whether the ranks of the present process group are known to have the same version."""

    def __init__(self) -> None:
        self._group: weakref.ref[dist.ProcessGroup] | None = None

    def attend(self, name_of: NameOf) -> None:
        """Compare versions before the first message in a process group. Raise `ExchangeError` on all ranks.

        This round has the form that all versions know.
        """
        world = dist.group.WORLD
        if world is None or (self._group is not None and self._group() is world):
            return
        mark = torch.tensor([_MAGIC + VERSION, 0], dtype=torch.int64, device=device())
        _check_versions({rank: int(tensor[0]) for rank, tensor in enumerate(_gathered(mark))}, name_of)
        self._group = weakref.ref(world)


_meeting: Final = _Meeting()


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have the same size."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def _slot(data: bytes) -> torch.Tensor:
    """Return what a rank sends first."""
    return _padded(_HEADER.pack(_MAGIC + VERSION, len(data)) + data[:_ROOM], _SLOT_BYTES)


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device())


def _sizes(slots: Mapping[int, torch.Tensor], name_of: NameOf) -> dict[int, int]:
    """Return the lengths of ranks' messages. Raise the same `ExchangeError` on all ranks if one is wrong."""
    headers = {
        rank: _HEADER.unpack(bytes(slot[: _HEADER.size].cpu().numpy())) for rank, slot in slots.items()
    }
    _check_versions({rank: mark for rank, (mark, _) in headers.items()}, name_of)
    for rank, (_, size) in headers.items():
        if not 0 <= size <= MESSAGE_BYTES:
            raise ExchangeError(f"{name_of(rank)} has a message of more than {MESSAGE_BYTES >> 20} MiB")
    return {rank: size for rank, (_, size) in headers.items()}


def _check_versions(marks: Mapping[int, int], name_of: NameOf) -> None:
    """Raise `ExchangeError` if ranks have different versions. `marks`: `_MAGIC` and the version, by rank."""
    versions = {rank: mark - _MAGIC if 0 < mark - _MAGIC < _VERSIONS else 0 for rank, mark in marks.items()}
    newest = max(versions, key=lambda rank: versions[rank])
    if old := [rank for rank, version in versions.items() if version < versions[newest]]:
        names = counted(len(old), "rank") if len(old) > _MAX_NAMES else ", ".join(map(name_of, old))
        raise ExchangeError(
            f"{names}: an older version of Checkmate than {name_of(newest)}'s; all ranks need the same one"
        )


def device(group: dist.ProcessGroup | None = None, models: torch.device | None = None) -> torch.device:
    """Return where a group's backend takes tensors: the CPU if it can, else the model's GPU.

    Args:
        group: `None` is the default group.
        models: Where the model is; without it, PyTorch's current GPU is used.
    """
    backends = str(dist.get_backend_config(group))
    if "cpu:" in backends:
        return torch.device("cpu")
    if models is not None and models.type != "cpu":
        return models
    return torch.device("cuda", torch.cuda.current_device())


def _encoded(message: Any) -> bytes:
    return json.dumps(message, allow_nan=False).encode()


def _decoded(data: torch.Tensor, name: str) -> Any:
    try:
        return json.loads(bytes(data.cpu().numpy()))
    except (ValueError, RecursionError):
        raise ExchangeError(f"{name} sent a message that is not JSON") from None
