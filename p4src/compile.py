"""Compile the data plane with p4c, and tell whether the committed output is that of the sources.

Usage:
    python -m p4src.compile            compile (`make p4`)
    python -m p4src.compile --check    exit 1 where the sources have changed since
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from p4src import ROOT, artifacts

PROGRAM = "checkmate_v1model"
COMPILER = "p4c-bm2-ss"
DIGEST = "sources.sha256"


def sources() -> list[Path]:
    """The P4 files that the program is made of."""
    return sorted([ROOT / f"{PROGRAM}.p4", *(ROOT / "include").glob("*.p4")])


def digest() -> str:
    """SHA-256 over the names and contents of the sources, in hexadecimal."""
    total = hashlib.sha256()
    for file in sources():
        total.update(f"{file.relative_to(ROOT)}\0".encode())
        total.update(file.read_bytes() + b"\0")
    return total.hexdigest()


def is_current() -> bool:
    """Whether the committed output was made of these sources."""
    file = artifacts() / DIGEST
    return file.exists() and file.read_text().split()[0] == digest()


def compile_program() -> int:
    """Run p4c from within the folder, so that the output has relative paths only; its exit status."""
    compiler = os.environ.get("P4C", COMPILER)
    if shutil.which(compiler) is None:
        sys.stderr.write(
            f"{compiler} is not on PATH. It is part of p4c, the reference compiler: "
            "github.com/p4lang/p4c says how to build or install it. P4C names another path, and "
            "P4C_16_INCLUDE_PATH the folder of core.p4 where it isn't found by itself.\n"
            "Nothing else needs it: the compiled program is in p4src/build.\n"
        )
        return 2
    build = artifacts().relative_to(ROOT)
    (ROOT / build).mkdir(parents=True, exist_ok=True)
    command = [
        compiler,
        "--std",
        "p4-16",
        "--p4runtime-files",
        f"{build}/{PROGRAM}.p4info.txtpb",
        "-o",
        f"{build}/{PROGRAM}.json",
        f"{PROGRAM}.p4",
    ]
    if folder := os.environ.get("P4C_16_INCLUDE_PATH"):
        command[1:1] = ["-I", folder]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status == 0:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        (ROOT / build / DIGEST).write_text(f"{digest()}\n")
        sys.stdout.write(f"compiled by {' '.join((version.stdout + version.stderr).split())}\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the output is current")
    if parser.parse_args().check:
        if is_current():
            return 0
        sys.stderr.write("p4src has changed since it was compiled; run `make p4`\n")
        return 1
    return compile_program()


if __name__ == "__main__":
    sys.exit(main())
