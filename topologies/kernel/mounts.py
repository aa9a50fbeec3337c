"""Small file systems in memory, so that a disk in a lab can be full."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_MNT_DETACH: Final = 2
_MOUNTS: Final = Path("/proc/self/mounts")


def mount_tmpfs(folder: Path, size: int) -> None:
    """Mount a file system of `size` bytes on a new folder; raise `OSError` if that is not possible."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size},mode=0700".encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))


def unmount_below(folder: Path) -> None:
    """Unmount all that is mounted below a folder, the innermost first, even if it is in use."""
    libc = ctypes.CDLL(None, use_errno=True)
    for mounted in sorted(below(folder), reverse=True):
        if libc.umount2(os.fsencode(mounted), _MNT_DETACH):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(mounted))


def below(folder: Path) -> list[Path]:
    """Return what is mounted below a folder."""
    targets = [Path(line.split()[1]) for line in _MOUNTS.read_text().splitlines()]
    return [target for target in targets if folder in target.parents]
