"""`checkmate shadow` that stops at a given point, to be killed there.

Arguments: WHERE ITERATION, followed by those of `checkmate`.

WHERE: receive (half of a range of the iteration's bytes is read), step (some parameters are stepped), fetch
(some of the requested state is sent).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from checkmate.cli.entry import main
from checkmate.shadow.calls import transfer as reading
from checkmate.shadow.receive.inlet import BucketSets
from checkmate.shadow.replica.blocks import Batch
from checkmate.shadow.replica.replica import Replica

STOPPED = "stopped here"


def stop() -> None:
    """Stop all threads; the reader of our output kills us."""
    print(STOPPED, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def patch(where: object, **replacements: Callable[..., Any]) -> None:
    """Replace functions."""
    for name, function in replacements.items():
        setattr(where, name, function)


def in_receive(when: int) -> None:
    room: Callable[..., memoryview] = BucketSets.room
    calls_in_iteration = 0

    def stopping(sets: BucketSets, iteration: int, bucket: int, start: int, end: int) -> memoryview:
        nonlocal calls_in_iteration
        calls_in_iteration += iteration == when
        if calls_in_iteration == 2:
            stop()
        return room(sets, iteration, bucket, start, end)

    patch(BucketSets, room=stopping)


def in_step(when: int) -> None:
    replica_step: Callable[..., Any] = Replica.step
    batch_step: Callable[..., bool] = Batch.step
    now = -1

    def noting(replica: Replica, iteration: int, *arguments: Any) -> Any:
        nonlocal now
        now = iteration
        return replica_step(replica, iteration, *arguments)

    def stopping(batch: Batch, *arguments: Any) -> bool:
        result = batch_step(batch, *arguments)
        if now == when:
            stop()
        return result

    patch(Replica, step=noting)
    patch(Batch, step=stopping)


def in_fetch(_: int) -> None:
    fetch: Callable[..., Iterator[Any]] = reading.fetch

    def stopping(*arguments: Any) -> Iterator[Any]:
        for number, message in enumerate(fetch(*arguments)):
            if number == 2:
                stop()
            yield message

    patch(reading, fetch=stopping)


if __name__ == "__main__":
    where, iteration = sys.argv[1:3]
    {"receive": in_receive, "step": in_step, "fetch": in_fetch}[where](int(iteration))
    sys.argv[1:] = sys.argv[3:]
    main()
