"""Replaces a version of the program by another one without losing a copy.

Packets in a switch's queues are lost with its program, and a lost copy never comes again. So training has to
stop first, whose TCP repeats what it misses, and the queues have to run empty. The controller then gives the
connected streams to the new program before it forwards again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Final

from finsy.proto import p4i

from controlplane.entities import WRITE_ORDER, Holdings, Update, difference
from controlplane.errors import WrongPipeline
from controlplane.p4runtime.codec import Codec

if TYPE_CHECKING:
    from controlplane.p4runtime.session import SwitchSession

QUEUE_SECONDS: Final = 1.0
"""Enough for any queue of a switch to run empty: a Tofino has 20 MB of them, and 12.5 GB/s a port."""

_log: Final = logging.getLogger("checkmate")


@contextlib.asynccontextmanager
async def vacated(session: SwitchSession, program: p4i.P4Info) -> AsyncIterator[None]:
    """Stop forwarding; load another program within the block. If it is refused, forward as before.

    Sets `session.vacated`, unless the switch has no streams, or a program that is not a version of ours.
    """
    if not is_ours(program):
        yield
        return
    theirs, stopped = session.codec.of_program(program), list[Update]()
    try:
        with _speaking(session, theirs):
            stopped = await _stop(session)
    except (LookupError, ValueError) as error:  # a table or field of ours that it does not have
        _log.warning(
            "switch %s: its program differs too much, so its streams end: %s", session.switch.name, error
        )
    try:
        yield
    except WrongPipeline:
        session.vacated = None
        with _speaking(session, theirs):
            await session.write([Update(None, one.entity) for one in reversed(stopped)])
        raise


def is_ours(program: p4i.P4Info) -> bool:
    """Return whether a program is some version of ours: it has a table of streams."""
    return any(table.preamble.alias == "streams" for table in program.tables)


async def _stop(session: SwitchSession) -> list[Update]:
    held = await session.read()
    if not held.table("streams"):
        return []
    stopped = [one for one in difference(held, Holdings()) if one.entity.feature == WRITE_ORDER[-1]]
    await session.write(stopped)
    session.vacated = held
    await asyncio.sleep(QUEUE_SECONDS)
    return stopped


@contextlib.contextmanager
def _speaking(session: SwitchSession, codec: Codec) -> Iterator[None]:
    ours, session.codec = session.codec, codec
    try:
        yield
    finally:
        session.codec = ours
