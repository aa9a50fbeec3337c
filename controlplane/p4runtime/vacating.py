"""Stops training on a switch before its program is replaced, so that no copy is lost.

Packets in a switch's queues are lost with its program, and a lost copy never comes again. So training has to
stop first, whose TCP repeats what it misses, on all switches, and the queues have to run empty. Copies still
reach shadow NICs meanwhile. The controller then gives the connected streams to the new program before it
forwards again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from finsy.proto import p4i

from controlplane.entities import WRITE_ORDER, Holdings, TableEntry, Update, difference
from controlplane.errors import SwitchUnreachable
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession

QUEUE_SECONDS: Final = 1.0
"""Enough for any queue of a switch to run empty: a Tofino has 20 MB of them, and 12.5 GB/s a port."""

_log: Final = logging.getLogger("checkmate")


@dataclass(frozen=True)
class VacatedState:
    """The holdings of a switch before training was stopped there, and the codec of its program."""

    holdings: Holdings
    codec: Codec


async def vacate(session: SwitchSession, keep: Collection[int]) -> VacatedState | None:
    """Stop training on a switch that runs a version of our program.

    Args:
        session: A session of the primary.
        keep: The MAC addresses to which the switch goes on to forward.

    Returns:
        The state that `resume` needs; `None` if there is nothing to keep, because it runs another program, or
        its version has other tables, or it holds nothing.
    """
    program = await session.program()
    if program is None or not is_ours(program):
        return None
    old_codec = session.codec.for_program(program)
    try:
        with _using_codec(session, old_codec):
            vacated = VacatedState(await session.read(), old_codec)
    except (LookupError, ValueError) as error:  # a table or field of ours that it does not have
        _log.warning("switch %s: its program differs, so streams end: %s", session.switch.name, error)
        return None
    if not vacated.holdings.entries:
        return None
    try:
        with _using_codec(session, old_codec):
            await session.write(
                [update for update in _forwarding_removals(vacated.holdings) if not _is_for(update, keep)]
            )
    except BaseException:
        with contextlib.suppress(SwitchUnreachable):
            await resume(session, vacated, Holdings())
        raise
    return vacated


async def resume(session: SwitchSession, vacated: VacatedState, planned: Holdings) -> None:
    """Have a switch whose program was not replaced forward as before, and as planned.

    An earlier attempt that was killed may have stopped it.
    """
    target = planned.copy()
    for entity in vacated.holdings:
        target.put(entity)
    with _using_codec(session, vacated.codec):
        missing = difference(await session.read(), target)
        await session.write([update for update in missing if update.new is not None and _forwards(update)])


def is_ours(program: p4i.P4Info) -> bool:
    """Return whether a program is some version of ours: it has a table of streams."""
    return any(table.preamble.alias == "streams" for table in program.tables)


def _forwarding_removals(holdings: Holdings) -> list[Update]:
    return [update for update in difference(holdings, Holdings()) if _forwards(update)]


def _forwards(update: Update) -> bool:
    return update.entity.feature == WRITE_ORDER[-1]


def _is_for(update: Update, macs: Collection[int]) -> bool:
    entity = update.entity
    return isinstance(entity, TableEntry) and dict(entity.match).get("mac") in macs


@contextlib.contextmanager
def _using_codec(session: SwitchSession, codec: Codec) -> Iterator[None]:
    new_codec, session.codec = session.codec, codec
    try:
        yield
    finally:
        session.codec = new_codec
