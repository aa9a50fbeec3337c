"""The training side: `checkmate.restore` and `checkmate.protect`."""

from checkmate.training import forks as forks  # before gRPC is imported
