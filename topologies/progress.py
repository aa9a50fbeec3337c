"""Progress of a run: each step with its duration, and a bar for transferred bytes."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import TaskID

from checkmate.output.consoles import folding, has_cursor, progress

_PRINT_SECONDS = 10.0


class StepProgress:
    """Context manager that reports steps: calling it begins the next step.

    On a terminal, the current step is shown live. Elsewhere, `advanced` prints a line every ten seconds.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._began = self._printed_at = 0.0
        self._live = progress(console, folding("{task.fields[amount]}"))
        self._task: TaskID | None = None

    def __call__(self, text: str) -> None:
        """Begin a step; the previous one is done."""
        self._end_step()
        self._text = text
        self._began = self._printed_at = time.monotonic()
        self._task = self._live.add_task(text, total=None, amount="")

    def moved(self, received: int, total: int) -> None:
        """Report the step's progress in bytes."""
        self.advanced(received, total, f"{received / 1e6:,.0f} of {total / 1e6:,.0f} MB at the shadow nodes")

    def advanced(self, completed: int, total: int, amount: str) -> None:
        """Report the step's progress, described by `amount`."""
        if not has_cursor(self._console) and time.monotonic() - self._printed_at > _PRINT_SECONDS:
            self._printed_at = time.monotonic()
            self._console.print(f"  {amount}", highlight=False, markup=False)
        if self._task is not None:
            self._live.update(self._task, completed=completed, total=total, amount=amount)

    def _end_step(self) -> None:
        if self._task is not None:
            seconds = time.monotonic() - self._began
            room = max(1, min(60, self._console.width - 10))
            self._console.print(f"{self._text:<{room}} {seconds:6.1f} s", highlight=False, markup=False)
            self._live.remove_task(self._task)
            self._task = None

    def __enter__(self) -> StepProgress:
        self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end_step()
        self._live.stop()
