"""Random loss at the egress of an interface, by `tc netem`, or by an eBPF classifier if the kernel lacks it.

In both cases the sender does not notice, as with a lossy cable. A GSO frame is lost as a whole.
Nothing is pinned: the kernel removes the classifier with its namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import Final

from pyroute2.netlink.exceptions import NetlinkError

from topologies.describe.topology import BadDescription, LabError
from topologies.kernel.namespaces import netlink

SYSCALLS: Final = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_PROG_LOAD: Final = 5
_SCHED_CLS: Final = 3
_TC_ACT_OK, _TC_ACT_STOLEN = 0, 4  # TC_ACT_STOLEN, unlike TC_ACT_SHOT, looks like success to the sender
_CLSACT_EGRESS: Final = 0xFFFFFFF3


def fraction(text: str) -> float:
    """Return `1%` or `0.01` as a fraction; raise `BadDescription` if it is not in [0, 1)."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise BadDescription(f"{text!r} is not a loss rate; use e.g. 1% or 0.01, below 100%")
    return value


def add(namespace: str, interface: str, share: float) -> str:
    """Drop this share of the frames that leave an interface, from now on; return the mechanism's name."""
    with netlink(namespace) as ip:
        index = ip.link_lookup(ifname=interface)[0]
        try:
            ip.tc("add", "netem", index, "1:", loss=share * 100)
            return "netem"
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
                raise
        program = load_program(share)
        try:
            ip.tc("add", "clsact", index)
            ip.tc(
                "add-filter",
                "bpf",
                index,
                ":1",
                fd=program,
                name="lossy",
                parent=_CLSACT_EGRESS,
                classid=1,
                direct_action=True,
            )
        except NetlinkError as error:
            raise LabError(f"this kernel has neither tc netem nor tc bpf for random loss: {error}") from None
        finally:
            os.close(program)
        return "bpf"


def instructions(share: float) -> bytes:
    """Return the eBPF program: it draws 32 random bits, and steals the frame below the threshold. Pure."""
    threshold = round(share * (1 << 32))
    return b"".join(
        [
            _instruction(0x85, immediate=7),  # r0 = get_prandom_u32()
            _instruction(0xB4, destination=1, immediate=threshold),  # r1 = threshold, unsigned
            _instruction(0xAD, destination=0, source=1, offset=2),  # if r0 < r1: skip two
            _instruction(0xB7, destination=0, immediate=_TC_ACT_OK),
            _instruction(0x95),
            _instruction(0xB7, destination=0, immediate=_TC_ACT_STOLEN),
            _instruction(0x95),
        ]
    )


def _instruction(
    opcode: int, destination: int = 0, source: int = 0, offset: int = 0, immediate: int = 0
) -> bytes:
    """Return a `struct bpf_insn` in the machine's byte order."""
    registers = source << 4 | destination if sys.byteorder == "little" else destination << 4 | source
    return struct.pack("=BBhI", opcode, registers, offset, immediate & 0xFFFFFFFF)


def load_program(share: float) -> int:
    """Load the program and return its file descriptor."""
    code = ctypes.create_string_buffer(instructions(share))
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    attributes = ctypes.create_string_buffer(
        struct.pack(
            "=IIQQ", _SCHED_CLS, (len(code) - 1) // 8, ctypes.addressof(code), ctypes.addressof(license_)
        ),
        128,
    )
    number = SYSCALLS.get(os.uname().machine)
    if number is None:
        raise LabError(f"the number of bpf(2) on {os.uname().machine} is unknown, and tc netem is missing")
    libc = ctypes.CDLL(None, use_errno=True)
    program = libc.syscall(number, _PROG_LOAD, ctypes.byref(attributes), len(attributes))
    if program < 0:
        raise LabError(
            f"the kernel refuses the eBPF program ({os.strerror(ctypes.get_errno())}), and has no tc netem"
        )
    return int(program)
