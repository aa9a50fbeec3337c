"""What ranks tell each other over `torch.distributed`: JSON of bounded size, with a version.

Torch's own collectives for objects carry pickled ones, which run code of whoever sends them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from checkmate.training.errors import SessionError
from checkmate.wording import counted

VERSION: Final = 7
"""Of these messages and of their order. Version 1 had pickled objects, and did not name itself; version 2 did
not compare NCCL's plugins; version 3 did not say what groups train; in version 4, each rank read all of the
state; in version 5, ranks did not compare what they had received; in version 6, all sent at once."""
MESSAGE_BYTES: Final = 16 << 20
"""The largest message; the longest are plans, with some bytes per shard."""
_MAGIC: Final = 0xC4EC_0000
_VERSIONS: Final = 0x10000
_NAMED: Final = 8
"""Ranks that an error names."""
_SHOWN: Final = 2000
"""Characters of an error of another rank."""


class ExchangeError(SessionError):
    """Another rank sent what this version of Checkmate does not understand. The message names the rank."""


Named = Callable[[int], str]
"""Returns a rank's name in messages."""


def gather(message: Any, *, named: Named = "rank {}".format) -> list[Any]:
    """Return the messages of all ranks, by rank. All ranks call it, in the same order.

    Args:
        message: What JSON can express.
        named: Returns a rank's name in errors.

    Raises:
        ExchangeError: On all ranks, if one has another version or a message that is too large.
    """
    data = _encoded(message)
    sizes = _headers(len(data), named)
    longest = torch.zeros(max(sizes), dtype=torch.uint8, device=device())
    longest[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    received = [torch.empty_like(longest) for _ in sizes]
    dist.all_gather(received, longest)
    return [_decoded(received[rank][:size], named(rank)) for rank, size in enumerate(sizes)]


def broadcast(message: Any, source: int, *, named: Named = "rank {}".format) -> Any:
    """Return the message of one rank. All ranks call it; the others' `message` is not used.

    Args:
        message: What JSON can express.
        source: The global rank that sends.
        named: Returns a rank's name in errors.

    Raises:
        ExchangeError: On all ranks, if one has another version or the message is too large.
    """
    data = _encoded(message if dist.get_rank() == source else None)
    size = _headers(len(data), named)[source]
    tensor = torch.zeros(size, dtype=torch.uint8, device=device())
    if dist.get_rank() == source:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(tensor, src=source)
    return _decoded(tensor, named(source))


def shortened(error: str) -> str:
    """Return an error's text, cut so that it fits into a message."""
    return error if len(error) <= _SHOWN else f"{error[:_SHOWN]}..."


def _headers(size: int, named: Named) -> list[int]:
    """Return the sizes of all ranks' messages, once all ranks are known to have the same version."""
    own = torch.tensor([_MAGIC + VERSION, size], dtype=torch.int64, device=device())
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(received, own)
    headers = [(int(version), int(length)) for version, length in (one.tolist() for one in received)]
    _check(headers, named)
    return [length for _, length in headers]


def _check(headers: list[tuple[int, int]], named: Named) -> None:
    """Raise the same error on all ranks if a header can't be used."""
    versions = [marked - _MAGIC if 0 < marked - _MAGIC < _VERSIONS else 0 for marked, _ in headers]
    newest = max(versions)
    if old := [rank for rank, version in enumerate(versions) if version < newest]:
        names = counted(len(old), "rank") if len(old) > _NAMED else ", ".join(map(named, old))
        new = versions.index(newest)
        raise ExchangeError(
            f"{names}: an older version of Checkmate than {named(new)}'s; all ranks need the same one"
        )
    for rank, (_, size) in enumerate(headers):
        if not 0 <= size <= MESSAGE_BYTES:
            raise ExchangeError(f"{named(rank)} has a message of more than {MESSAGE_BYTES >> 20} MiB")


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
