"""Processes of another user, and processes with exactly the privileges of a unit for systemd, without it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
UNITS: Final = ROOT / "deploy" / "systemd"
NOBODY: Final = 65534
# setpriv itself still has capabilities when it executes the next program: `env` has none.
USER: Final = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env"]
TMP: Final = "/var/tmp" if ROOT.is_relative_to("/tmp") else "/tmp"
"""The private folder for temporary files; files of tests must be elsewhere."""
_MOUNTS: Final = (
    f"mount -o remount,bind,ro / && mount -t tmpfs -o mode=1777 tmpfs {TMP} "
    '&& mount -t proc -o hidepid=invisible proc /proc && exec "$@"'
)


class Unit:
    """A unit's `[Service]` section. A key's later lines replace earlier ones, as all of ours want."""

    def __init__(self, name: str) -> None:
        text = (UNITS / name).read_text()
        self.keys: Final = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))

    @property
    def capabilities(self) -> list[str]:
        """The unit's capabilities, as `setpriv` names them. Those that it gets are those that it may have."""
        assert self.keys["AmbientCapabilities"] == self.keys["CapabilityBoundingSet"]
        return [word.removeprefix("CAP_").lower() for word in self.keys["AmbientCapabilities"].split()]

    def arguments(self, **replaced: str) -> list[str]:
        """Return what follows `checkmate` in the unit's command, with values of options and `%i` replaced.

        The last word is replaced by `file`, the value of `--metrics` by `metrics`.
        """
        _, *words = shlex.split(self.keys["ExecStart"])
        words[-1] = replaced["file"]
        words[words.index("--metrics") + 1] = replaced["metrics"]
        return [word.replace("%i", replaced.get("i", "")) for word in words]

    def start(self, capabilities: Collection[str] | None = None) -> list[str]:
        """Return the beginning of a command line that has the unit's privileges.

        Args:
            capabilities: The only ones, instead of the unit's.
        """
        assert self.keys["ProtectSystem"] == "strict"
        assert self.keys["PrivateTmp"] == self.keys["NoNewPrivileges"] == "yes"
        granted = self.capabilities if capabilities is None else capabilities
        assert self.keys["ProtectProc"] == "invisible"
        return ["unshare", "--mount", "sh", "-c", _MOUNTS, "sh", *privileges(granted), *self._filtered()]

    def _filtered(self) -> list[str]:
        families = self.keys["RestrictAddressFamilies"]
        calls = self.keys["SystemCallFilter"]
        return [python(), "-m", "tests.scripts.filtered", families, calls]


def privileges(capabilities: Collection[str]) -> list[str]:
    """Return the beginning of a command line of an ordinary user who has only these capabilities."""
    sets = ",".join(["-all", *(f"+{capability}" for capability in capabilities)])
    caps = [f"--{kind}={sets}" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
    return [*USER[:-1], *caps, "--no-new-privs", "env"]


def environment(home: Path) -> dict[str, str]:
    """Return the environment of another user's process, which finds this project and its packages."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }


@cache
def python() -> str:
    """Return an interpreter that another user can execute, with the packages of this one."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*USER, path, "-c", "import torch"]
        try:
            subprocess.run(command, env=environment(Path("/")), cwd="/", capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    pytest.skip("another user can execute no interpreter that has torch")
