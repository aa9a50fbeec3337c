"""Questions to other hosts, each with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, questions: Iterable[Callable[[], T]], late: T) -> list[T]:
    """Ask all questions at once, and return the answers in their order.

    Looking up a name has no timeout of its own: if no name server answers, it takes very long.
    So a thread that is late is left behind, and ends with the process; an executor would wait for it.

    Args:
        seconds: for all of them.
        questions: each must raise nothing.
        late: the answer of those that take longer.
    """
    functions = list(questions)
    answers = [late] * len(functions)

    def ask(number: int) -> None:
        answers[number] = functions[number]()

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return list(answers)
