"""The training side: what a script's `checkmate.restore` and `checkmate.protect` do."""

from checkmate.training import forks as forks  # before gRPC is imported
