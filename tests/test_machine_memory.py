"""The memory that a process may take, with and without limits of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkmate.base import machine_memory

GB = 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 4000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/\n0::/job.slice/shadow.service\n")
    mount = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(f"24 1 0:2 / / rw - ext4 /dev/sda rw\n{mount}")
    (tmp_path / "sys/fs/cgroup/job.slice/shadow.service").mkdir(parents=True)
    return tmp_path


def limit(folder: Path, most: int | str, used_bytes: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used_bytes}\n")


def test_without_limits_it_is_the_machine_s(root: Path) -> None:
    limit(root / "sys/fs/cgroup/job.slice", "max", GB)
    assert (machine_memory.total(root), machine_memory.available(root)) == (8000000 << 10, 4000000 << 10)


def test_the_tightest_cgroup_counts_also_one_above(root: Path) -> None:
    limit(root / "sys/fs/cgroup/job.slice", 3 * GB, 2 * GB)
    limit(root / "sys/fs/cgroup/job.slice/shadow.service", 2 * GB, GB // 4)
    assert (machine_memory.total(root), machine_memory.available(root)) == (2 * GB, GB)


def test_a_process_above_its_limit_has_nothing_left(root: Path) -> None:
    limit(root / "sys/fs/cgroup/job.slice/shadow.service", GB, 2 * GB)
    assert machine_memory.available(root) == 0


def test_a_cgroup_namespace_shows_its_own_root(root: Path) -> None:
    """In a container, mountinfo names a root that the process's path is below."""
    mountinfo = root / "proc/self/mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace("0:26 /", "0:26 /job.slice"))
    (root / "sys/fs/cgroup/shadow.service").mkdir()
    limit(root / "sys/fs/cgroup/shadow.service", GB, 0)
    assert machine_memory.total(root) == GB


def test_a_cgroup_outside_of_the_mount_is_not_looked_up(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/../other\n")
    mountinfo = root / "proc/self/mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace("0:26 /", "0:26 /job.slice"))
    assert machine_memory.total(root) == 8000000 << 10


def test_a_machine_without_cgroup_v2(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("3:memory:/a\n")
    assert machine_memory.total(root) == 8000000 << 10


def test_this_machine() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine_memory.available() < machine_memory.total() <= physical
