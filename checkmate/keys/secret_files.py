"""Symmetric secrets: 32 random bytes, in a file as hexadecimal digits and a newline. No I/O."""

from __future__ import annotations

import re
import secrets
from typing import Final

from checkmate.keys.errors import Malformed

SECRET_BYTES: Final = 32

_TEXT: Final = re.compile(rb"[0-9a-fA-F]{64}\s*")


def new_secret() -> bytes:
    """Return the content of a new secret's file."""
    return f"{secrets.token_hex(SECRET_BYTES)}\n".encode()


def parse_secret(content: bytes) -> bytes:
    """Return a secret, 32 bytes, from its file's content. Raise `Malformed` if it is something else."""
    if not _TEXT.fullmatch(content):
        raise Malformed(
            f"is not {2 * SECRET_BYTES} hexadecimal digits, as from: openssl rand -hex {SECRET_BYTES}"
        )
    return bytes.fromhex(content.decode())
