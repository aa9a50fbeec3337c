"""The embedded P4 target, which runs a compiled v1model program behind P4Runtime."""

import os

# Libraries read these when they are imported. gRPC itself logs each failed handshake, without a limit. The
# threads with which numpy computes would keep privileges that are dropped later.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
