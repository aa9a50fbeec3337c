"""A whole game day, its command line, and its disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gameday.faults import fill
from tests.support import terminated
from tests.support.labs.live import needs_clang, needs_root
from topologies.kernel import mounts

MINUTES = float(os.environ.get("CHECKMATE_GAMEDAY_MINUTES", "20"))
SEED = 14
AFTER = 900
"""Seconds beside the schedule: the lab, the last incident, and the undisturbed runs."""


def gameday(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gameday", *arguments]
    return terminated.run(command, timeout)


@needs_root
@needs_clang
@pytest.mark.slow
@terminated.time_limit(60 * MINUTES + AFTER)
def test_a_game_day() -> None:
    result = gameday("--seed", str(SEED), "--minutes", f"{MINUTES:g}", timeout=60 * MINUTES + AFTER)
    print(result.stdout)  # which says if alerts were not checked
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_schedule_can_be_read() -> None:
    result = gameday("--seed", "3", "--show")
    assert result.returncode == 0
    assert "lost shard" in result.stdout and "expects the disk" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--only", "flood"), "--only flood: there are killed rank"), (("--minutes", "0"), "minutes above 0")],
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = gameday(*arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


@needs_root
def test_a_small_disk_is_full_until_there_is_room_again(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mounts.mount_tmpfs(disk, 1 << 16)
    try:
        make_room = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            disk.joinpath("more").write_bytes(b"more")
        make_room()
        disk.joinpath("more").write_bytes(b"more")
        assert mounts.below(tmp_path) == [disk]
    finally:
        mounts.unmount_below(tmp_path)
    assert mounts.below(tmp_path) == [] and [*disk.iterdir()] == []
