"""Compile the data plane with p4c, and check that the committed output is current.

Usage:
    python -m p4src.compile            compile for BMv2, and the Tofino program's test bed (`make p4`)
    python -m p4src.compile tofino     compile for a Tofino, into $SDE_INSTALL or out/sde
    python -m p4src.compile --check    exit 1 if the sources have changed since
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p4src import ROOT, artifacts, tofino

PROGRAM = "checkmate_v1model"
HALVES = ("ingress", "egress")
"""Halves of the Tofino program, each a v1model program (`tna_on_v1model/`)."""
TARGETS = ("bmv2", "tna", *tofino.ARCHITECTURES)
"""Targets with committed output. `tna` is the test bed of the Tofino program."""
COMPILER = "p4c-bm2-ss"
DIGEST = "sources.sha256"
_COMMENT = re.compile(r'(?P<text>"(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
CPU_PORT = 510
"""CPU port of the halves, as on every target of the packet tests."""


def sources(target: str = "bmv2") -> list[Path]:
    """Return the P4 source files of the program for `target`."""
    files = [ROOT / f"{PROGRAM if target == 'bmv2' else tofino.PROGRAM}.p4"]
    if target == "tna":
        files += (ROOT / "tna_on_v1model").glob("*.p4")
    return sorted([*files, *(ROOT / "include").glob("*.p4")])


def code_of(file: Path) -> str:
    """Return a source file without comments, empty lines and indentation, which change no program."""
    text = _COMMENT.sub(lambda match: match["text"] or " ", file.read_text())
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def digest(target: str = "bmv2") -> str:
    """Return the SHA-256 of names and code of the sources, in hexadecimal."""
    total = hashlib.sha256()
    for file in sources(target):
        total.update(f"{file.relative_to(ROOT)}\0{code_of(file)}\0".encode())
    return total.hexdigest()


def outputs(target: str = "bmv2") -> list[str]:
    """Return the committed files for `target`, without the digest."""
    if target in tofino.ARCHITECTURES:
        return [tofino.P4INFO, tofino.SCHEMA]
    names = [PROGRAM] if target == "bmv2" else HALVES
    return [f"{name}.{ending}" for name in names for ending in ("json", "p4info.txtpb")]


def is_current(target: str = "bmv2") -> bool:
    """Return whether the committed output exists and matches these sources."""
    folder = artifacts(target)
    if not all((folder / name).is_file() for name in (*outputs(target), DIGEST)):
        return False
    return (folder / DIGEST).read_text().split() == [digest(target)]


def write_digest(target: str) -> None:
    """Record that the output matches the current sources."""
    (artifacts(target) / DIGEST).write_text(f"{digest(target)}\n")


def find_compiler(target: str = "bmv2") -> str | None:
    """Return the path of the compiler for `target`, or `None` if it is not there."""
    if target in tofino.ARCHITECTURES:
        return tofino.driver(target)
    override = os.environ.get("P4C")
    return shutil.which(os.path.abspath(override) if override and "/" in override else override or COMPILER)


def compile_program(target: str = "bmv2") -> int:
    """Run p4c in the folder, so that the output has only relative paths; return its exit status."""
    override, compiler = os.environ.get("P4C"), find_compiler(target)
    if compiler is None:
        sys.stderr.write(
            f"{override or COMPILER} is not {'found' if override else 'on PATH'}. It is part of p4c, the "
            "reference compiler; see github.com/p4lang/p4c for its installation. P4C specifies another path, "
            "and P4C_16_INCLUDE_PATH the folder of core.p4 if p4c does not find it.\n"
            "Nothing else needs it: the compiled program is in p4src/build.\n"
        )
        return 2
    build = artifacts(target).relative_to(ROOT)
    (ROOT / build).mkdir(parents=True, exist_ok=True)
    for name, source, options in _units(target):
        command = [compiler, "--std", "p4-16", *options]
        if folder := os.environ.get("P4C_16_INCLUDE_PATH"):
            command += ["-I", os.path.abspath(folder)]
        command += ["--p4runtime-files", f"{build}/{name}.p4info.txtpb", "-o", f"{build}/{name}.json", source]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status != 0:
            return status
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    write_digest(target)
    sys.stdout.write(f"{target}: compiled by {' '.join((version.stdout + version.stderr).split())}\n")
    return 0


def _units(target: str) -> list[tuple[str, str, Sequence[str]]]:
    """Return the compilations for `target`: name of the output, source, additional options."""
    if target == "bmv2":
        return [(PROGRAM, f"{PROGRAM}.p4", ())]
    folder = "tna_on_v1model"
    options = ["-I", folder, "-I", ".", f"-DCHECKMATE_CPU_PORT={CPU_PORT}"]
    # Code for the other half or only for Tofino is unused here: suppress warnings of that.
    options += ["--Wdisable", "--Wdisable=removed"]
    return [(half, f"{folder}/{half}.p4", options) for half in HALVES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", nargs="?", choices=("bmv2", *tofino.ARCHITECTURES), default="bmv2")
    parser.add_argument("--check", action="store_true", help="only check whether the output is current")
    parser.add_argument(
        "--cpu-port",
        type=_port,
        metavar="PORT",
        help="the controller's device port (checkmate docs tofino)",
    )
    options = parser.parse_args()
    if options.check:
        return _check()
    if options.cpu_port is not None and options.target == "bmv2":
        parser.error("--cpu-port is for a Tofino; BMv2 gets its port when it starts")
    if options.target == "bmv2":
        return compile_program("bmv2") or compile_program("tna")
    status = tofino.compile_program(options.target, options.cpu_port)
    if status == 0:
        write_digest(options.target)
    return status


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 9):
        raise argparse.ArgumentTypeError(f"{text!r}: a device port is a number from 0 to 511")
    return int(text)


def _check() -> int:
    stale = [target for target in TARGETS if not is_current(target)]
    for target in stale:
        argument = f" {target}" if target in tofino.ARCHITECTURES else ""
        command = f"python -m p4src.compile{argument}"
        sys.stderr.write(f"p4src has changed since it was compiled for {target}; run `{command}`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
