"""Contents of a lab's buckets: random, different in each iteration, and cheap to write and to check."""

from __future__ import annotations

import hashlib

import torch

_PERIOD = 4_194_301  # a prime, so that misplaced bytes are not right by chance


class Contents:
    """Every byte of every bucket in each iteration, as a function of the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        noise = torch.randint(
            0, 256, (_PERIOD,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        # Two periods, so that a run of _PERIOD bytes can start anywhere in the first.
        self._noise = torch.cat([noise, noise])
        self._scratch = torch.empty(_PERIOD, dtype=torch.uint8)

    def fill(self, tensor: torch.Tensor, start: int, stop: int, *, bucket: int, iteration: int) -> None:
        """Write bytes [start, stop) of a flat tensor."""
        target = tensor.view(torch.uint8)
        for first in range(start, stop, _PERIOD):
            last = min(first + _PERIOD, stop)
            self._expected(first, last, bucket, iteration, target[first:last])

    def equal(self, tensor: torch.Tensor, *, bucket: int, iteration: int) -> bool:
        """Return whether a whole flat tensor has the contents of `iteration`."""
        actual = tensor.view(torch.uint8)
        for first in range(0, len(actual), _PERIOD):
            last = min(first + _PERIOD, len(actual))
            expected = self._scratch[: last - first]
            self._expected(first, last, bucket, iteration, expected)
            if not torch.equal(actual[first:last], expected):
                return False
        return True

    def _expected(self, first: int, last: int, bucket: int, iteration: int, out: torch.Tensor) -> None:
        word = f"{self._seed} {bucket} {iteration}".encode()
        digest = hashlib.blake2b(word, digest_size=5).digest()
        begin = (int.from_bytes(digest[:4], "big") + first) % _PERIOD
        torch.bitwise_xor(self._noise[begin : begin + last - first], digest[4], out=out)
