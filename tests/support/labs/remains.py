"""`checkmate lab` as a command, and all traces of a lab on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import COMMAND
from topologies import state
from topologies.describe.job_files import Target
from topologies.kernel import namespaces

LAB_COMMAND = [*COMMAND, "lab"]
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Remains:
    """Traces of a lab on the machine."""

    namespaces: list[str]
    processes: list[int]
    folder: bool
    cgroups: list[str]
    stray_links: set[str]

    def __bool__(self) -> bool:
        return bool(self.namespaces or self.processes or self.folder or self.cgroups or self.stray_links)


def remains(name: str, links_before: set[str]) -> Remains:
    present = namespaces.of_lab(name)
    cgroups = [str(path) for mount in _cgroup_mounts() for path in Path(mount).rglob(f"checkmate-lab-{name}")]
    lab_links = {
        link for link in set(os.listdir("/sys/class/net")) - links_before if link.startswith(("port", "data"))
    }
    return Remains(present, namespaces.processes(present), state.folder(name).exists(), cgroups, lab_links)


def _cgroup_mounts() -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [fields[1] for line in lines if (fields := line.split())[2] == "cgroup2"]


def any_target() -> Target:
    """Return BMv2 if it is installed, because it is harder to remove."""
    return "bmv2" if shutil.which("simple_switch_grpc") else "softswitch"


def lab_command(*arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*LAB_COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": str(columns)},
    )
