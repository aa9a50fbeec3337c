"""Comparison of a rank's record with the undisturbed rank's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FROM_FIRST = ("model", "buffers")
"""Ranks other than the first have different buffers until DDP broadcasts the first rank's in a forward."""


def differences(
    rank: int,
    lines: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    *,
    broadcast: bool = True,
) -> list[str]:
    """Return each start's first difference: in the resumed iteration, in a loss, or in the state.

    `broadcast`: whether all ranks get the first one's buffers, as under DDP.
    """
    reference = {line["iteration"]: line for line in expected if line["event"] == "iteration"}
    problems: dict[int, str] = {}
    for line in lines:
        attempt, iteration = line["attempt"], line.get("iteration")
        if attempt in problems:
            continue
        if line["event"] == "iteration":
            if reference[iteration]["loss"] != line["loss"]:
                problems[attempt] = f"rank{rank}, start {attempt}: the loss of iteration {iteration} differs"
            elif parts := _parts(line["digest"], reference[iteration]["digest"]):
                problems[attempt] = f"rank{rank}, start {attempt}: after iteration {iteration} differ {parts}"
        elif line["event"] == "resumed" and iteration:
            but = _FROM_FIRST if broadcast and rank else ()
            if parts := _parts(line["digest"], reference[iteration - 1]["digest"], but):
                problems[attempt] = (
                    f"rank{rank}, start {attempt}: as restored (iteration {iteration}) differ {parts}"
                )
    return list(problems.values())


def _parts(actual: str, expected: str, but: Sequence[str] = ()) -> str:
    """Return the names of the parts whose digests differ, if one of them is not in `but`."""
    actual_digests, expected_digests = (
        dict(part.split("=") for part in text.split()) for text in (actual, expected)
    )
    return ", ".join(
        name
        for name in actual_digests
        if actual_digests[name] != expected_digests.get(name) and name not in but
    )
