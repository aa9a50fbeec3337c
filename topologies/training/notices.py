"""What `lab train` tells of the lines that ranks write, beside what rank 0 itself writes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from checkmate.base.wording import signal_name
from topologies.logs import LogLine

_ERROR: Final = re.compile(
    r"^(?:\[(?P<rank>rank\d+)\]: )?(?P<module>(?:\w+\.)*)(?P<kind>[A-Z]\w*)(?:: (?P<text>.*))?$"
)
"""The last line of a traceback, with the prefix that torch writes once there is a process group."""
_KIND: Final = re.compile(r"Error$|Exception$")
_OF_ANOTHER: Final = re.compile(
    r"^(?:RingError|RingTimeout|Dist(?:Network|Store)Error|Connection\w*Error|BrokenPipeError|ChildFailedError)\b"
    r"|^DistBackendError\b.*(?:remote|system error|[Tt]imeout|timed out|abort|[Ss]ocket)"
    r"|[Cc]onnection (?:closed|reset|refused)|[Bb]roken pipe"
)
"""An error that the death of another rank causes."""
_MISFIT: Final = re.compile(r"hold another model|the state('s| has| is)|doesn't fit the script")
"""A `RestoreError` for which the script is another one than the state's."""
_REFUSALS: Final = ("RefusedError", "StateError", "UnsupportedOptimizer")
"""Errors of Checkmate's that depend on the script alone, so that no restart ends them."""
_FAILED: Final = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: \d+ \(pid: (?P<pid>\d+)\)")
"""In torchrun's log, once for a start of training on a host."""
_RESUMED: Final = re.compile(r"iteration (\d+) comes next")
_CHECKMATES: Final = re.compile(r"\bcheckmate: ")


class Notices:
    """Errors and deaths of ranks. An error is told once for all ranks, and again at its 2nd and 10th time."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        """By error: how often each rank has had it."""
        self._last: dict[str, tuple[str, str]] = {}
        """By node: the last error in its log, and its kind if it is one of Checkmate's."""
        self._ended_by: dict[tuple[str, str], str] = {}
        """By node and error that has ended a script there: where that start of training had begun."""
        self._begin = ""
        self.repeated = ""
        """Why no further start of training will help: an error that has ended two, if one has."""
        self.has_checkmates_lines = False
        """Whether a rank has logged anything of Checkmate's."""

    def of(self, line: LogLine) -> str | None:
        """Return what to tell about a line, nothing if it was told already; `None` for other lines."""
        self.has_checkmates_lines |= bool(_CHECKMATES.search(line.text))
        if resumed := _RESUMED.search(line.text):
            self._begin = resumed[1]
        if not line.error:
            return None
        if failed := _FAILED.search(line.text):
            return self._of_failure(line.node, int(failed["code"]), failed["pid"])
        error_match = _ERROR.match(line.text)
        if error_match is None:
            return None
        kind, is_checkmates = error_match["kind"], error_match["module"].startswith("checkmate.")
        self.has_checkmates_lines |= is_checkmates
        error = f"{kind}: {error_match['text']}" if error_match["text"] else kind
        if not (is_checkmates or _KIND.search(kind)) or _OF_ANOTHER.search(kind if is_checkmates else error):
            return None
        self._last[line.node] = error, kind if is_checkmates else ""
        return self._of_error(error, kind, error_match["rank"] or line.node)

    def _of_failure(self, node: str, code: int, pid: str) -> str | None:
        """Return what to tell of a script's end on a node."""
        if code < 0:
            self._last.pop(node, None)
            return f"{_spaced(node)}: process {pid} was ended by {signal_name(-code)}"
        error, kind = self._last.pop(node, ("", ""))
        before = self._ended_by.get((node, error))
        # Another error of Checkmate's is of nodes, switches or other ranks, which may be back later.
        no_restart_helps = kind in _REFUSALS or (kind == "RestoreError" and _MISFIT.search(error))
        if error and before is not None and (no_restart_helps if kind else before == self._begin):
            self.repeated = error
        self._ended_by[node, error] = self._begin
        return None

    def _of_error(self, error: str, kind: str, name: str) -> str:
        counts = self._counts.setdefault(error, Counter())
        before = max(counts.values(), default=0)
        counts[name] += 1
        if counts[name] <= before or counts[name] not in _REPORTED_COUNTS:
            return ""
        return f"{_spaced(name)}: {f'{kind} as above, {counts[name]} times so far' if before else error}"


_REPORTED_COUNTS: Final = (1, 2, 10, 100)


def _spaced(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=\d)", " ", name)
