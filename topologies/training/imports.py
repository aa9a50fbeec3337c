"""Imports PyTorch and then Checkmate, as a training script does, and notes when each is there."""

from __future__ import annotations

import time
from typing import Final

import torch.distributed
import torch.nn.parallel  # noqa: F401 - what scripts have before Checkmate

TORCH_AT: Final = time.monotonic()

import checkmate  # noqa: E402 - it is timed

NAMES: Final = (checkmate.restore, checkmate.protect)  # each is imported when it is first named
CHECKMATE_AT: Final = time.monotonic()
