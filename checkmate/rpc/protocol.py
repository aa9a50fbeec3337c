"""The version of everything that trainers, shadow nodes and checkpoints on disk exchange. Pure."""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = 7
"""The version of messages, records, layouts and checkpoints. What lacks a version has 0, and is older.

Version 1 had no `Reset`, layouts of version 2 no slicing, and those of version 3 no chunks, no
shares and no types of gradients. Version 4 did not tell meshes apart, in
version 5 seeds had another checksum, and in version 6 plain state was an archive of `torch.save`.
"""

TEXT_MAX: Final = 256
"""Characters of names of runs, of ranks and of software."""
REFUSAL_MAX: Final = 4096
"""Characters of the text of a `RefusedRequest`. Trainers cut it, and nodes refuse a longer one."""


def mismatch(theirs: int, them: str, us: str) -> str:
    """Return in one sentence which side is older, or "" if both have the same version.

    Args:
        theirs: the other side's version.
        them: what the other side is, such as `the caller`.
        us: what this side is.
    """
    if theirs == PROTOCOL:
        return ""
    older = them if theirs < PROTOCOL else us
    return (
        f"{them} has protocol {theirs}, {us} has {PROTOCOL}: {older} has an older version of Checkmate; "
        "install the same version on all hosts"
    )
