"""Renew the lists of packages that set-up installs, with the hashes of their files: `python -m tools.lock`.

Versions stay as they are unless setup.cfg rules them out; `--upgrade` takes the newest. torch and its
CUDA packages have no hashes, so that a local build or one for CPUs can take their place.
`--of REPORT` prints those of the list that `pip install --report` names, for images.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
PIP: Final = ROOT / "constraints-pip.txt"
TORCH: Final = ROOT / "constraints-torch.txt"
SHELL: Final = ROOT / "checkmate" / "cli" / "shell.txt"

_SHELL_NEEDS: Final = ("p4runtime-shell==0.0.6", "protobuf==3.20.3", "setuptools<81")
"""The list that `checkmate shell --install` installs; design.md, section 8, has the reason."""
_OLDEST_PYTHON: Final = "3.11"
_OPTIONS: Final = ("--universal", "--generate-hashes", "--no-annotate", "--no-header", "--quiet")
_WITHOUT_HASHES: Final = re.compile(r"(torch|triton|(nvidia|cuda)-[a-z0-9-]+)==")


class LockError(Exception):
    """The lists cannot be renewed; the message has the reason."""


def with_hashes(compiled: str) -> str:
    """Return uv's list of requirements without those that set-up installs without hashes. Pure."""
    return "".join(
        requirement for requirement in _requirements(compiled) if not _WITHOUT_HASHES.match(requirement)
    )


def filter_by_report(report: str, constraints: str) -> str:
    """Return those of a list of requirements that a report of pip's names. Pure.

    Others that it names are left out: `pip check` misses them, if something needs them.
    """
    names = {_canonical(package["metadata"]["name"]) for package in json.loads(report)["install"]}
    return "".join(
        requirement
        for requirement in _requirements(constraints)
        if _canonical(requirement.partition("==")[0]) in names
    )


def _requirements(text: str) -> list[str]:
    """Return the entries of a list, each with the lines of its hashes."""
    return re.split(r"^(?=\S)", text, flags=re.MULTILINE)


def _canonical(name: str) -> str:
    """Return a name as PEP 503 writes it. An image of Python has no `packaging`, whose function this is."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _compile(source: str, constraints: Path, *more: str, stdin: str | None = None) -> str:
    """Return what uv resolves; versions in `constraints` are preferred. Raise `LockError` if it fails."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise LockError("uv is not installed; install it with: pip install uv")
    index = {"UV_DEFAULT_INDEX": url} if (url := os.environ.get("PIP_INDEX_URL")) else {}
    command = [uv, "pip", "compile", source, "--python-version", _OLDEST_PYTHON, *_OPTIONS, *more]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / constraints.name
        output.write_text(constraints.read_text() if constraints.exists() else "")
        command += ["--output-file", str(output)]
        environment = {**os.environ, **index}
        result = subprocess.run(command, cwd=ROOT, env=environment, input=stdin, text=True, check=False)
        if result.returncode:
            raise LockError(f"nothing was renewed, because uv failed with status {result.returncode}")
        return output.read_text()


def renew(upgrade: bool) -> None:
    """Write all lists; on failure raise `LockError` and write none."""
    more = ("--upgrade",) if upgrade else ()
    extras = ("--extra", "test", "--extra", "docs", "--constraint", str(TORCH))
    project = with_hashes(_compile("setup.cfg", CONSTRAINTS, *extras, *more))
    pip = _compile("-", PIP, *more, stdin="pip")
    shell = _compile("-", SHELL, *more, stdin="\n".join(_SHELL_NEEDS))
    PIP.write_text(pip)
    CONSTRAINTS.write_text(project)
    SHELL.write_text(shell)


def main() -> int:
    """Renew the lists; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.lock", description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--of", type=Path, metavar="REPORT", help="print those that a report of pip's names")
    options = parser.parse_args()
    if options.of is not None:
        print(filter_by_report(options.of.read_text(), CONSTRAINTS.read_text()), end="")
        return 0
    try:
        renew(options.upgrade)
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
