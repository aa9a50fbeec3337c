"""The training side: what a script's `checkmate.restore` and `checkmate.protect` do."""

import os

# Before gRPC is imported. Its fork handlers abort the workers that a DataLoader forks while calls are under way;
# those don't call shadow nodes, and need none.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
