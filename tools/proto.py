"""Generate `checkmate/rpc/shadow_pb2*` from `shadow.proto` (`make proto`).

grpcio-tools is pinned to the version whose code runs with protobuf runtimes from 6.31 to 7.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "checkmate/rpc/shadow.proto"
KINDS = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")


def generate(folder: Path) -> None:
    """Write the four files below `folder`; raise `CalledProcessError` if the compiler refuses the source."""
    plugins = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    outputs = [f"--{kind}={'quiet:' if 'mypy' in kind else ''}{folder}" for kind in KINDS]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, SOURCE]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **plugins}, check=True)


if __name__ == "__main__":
    generate(ROOT)
