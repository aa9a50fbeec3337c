"""Run a command with a unit's filters: `python -m tests.scripts.filtered FAMILIES CALLS COMMAND...`.

As systemd makes them: a system call that is not in CALLS ends the process (SIGSYS), and sockets of other
address families are refused (seccomp(2)). Needs `systemd-analyze`, and the kernel's headers for numbers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

HEADER: Final = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_NUMBER, _FIRST_ARGUMENT = 0, 16  # in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def calls_in(groups: Iterable[str]) -> set[str]:
    """Return the system calls in groups of systemd, such as `@system-service`, and in groups within them."""
    text = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True)
    blocks = re.findall(r"^(@[\w-]+)\n((?: .*\n)*)", text.stdout, re.MULTILINE)
    members = {name: [word for word in body.split("\n") if word.strip()] for name, body in blocks}
    pending, calls = {"@default", *groups}, set[str]()
    while pending:
        name = pending.pop()
        for member in (line.strip() for line in members[name] if not line.strip().startswith("#")):
            (pending if member.startswith("@") else calls).add(member)
    return calls


def program(families: Iterable[str], calls: Iterable[str]) -> bytes:
    """Return the filter as instructions of classic BPF."""
    numbers = {name: int(n) for name, n in re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())}
    code = [_step(_LOAD, _NUMBER), _step(_JUMP_IF_EQUAL, numbers["socket"], 0, 2 + 2 * len(list(families)))]
    code.append(_step(_LOAD, _FIRST_ARGUMENT))
    for family in families:
        code += [_step(_JUMP_IF_EQUAL, getattr(socket, family), 0, 1), _step(_RETURN, _ALLOW)]
    code.append(_step(_RETURN, _ERRNO | errno.EAFNOSUPPORT))
    for call in sorted(set(calls) & numbers.keys()):
        code += [_step(_JUMP_IF_EQUAL, numbers[call], 0, 1), _step(_RETURN, _ALLOW)]
    return b"".join([*code, _step(_RETURN, _KILL)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def main(words: Sequence[str]) -> None:
    """Install the filter, and execute the command."""
    families, groups, *command = words
    code = program(families.split(), calls_in(groups.split()))
    filter_bytes = ctypes.create_string_buffer(code, len(code))
    filter_program = _Program(len(code) // 8, ctypes.addressof(filter_bytes))
    if ctypes.CDLL(None, use_errno=True).prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_program), 0, 0
    ):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
