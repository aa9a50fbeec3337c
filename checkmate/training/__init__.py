"""The training side: what a script's `checkmate.restore` and `checkmate.protect` do."""

import os

# Before gRPC is imported: its fork handlers abort the workers that a DataLoader forks while calls are under
# way. Those don't call shadow nodes, and need none.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
