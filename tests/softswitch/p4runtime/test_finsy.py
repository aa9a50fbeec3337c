"""finsy, the controller's own library, as a client of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar, cast

import finsy as fy
import pytest
from finsy.p4entity import P4Entity, P4Replica

from tests.softswitch.support.client import DEVICE, KINDS, Running

OPTIONS = fy.SwitchOptions(
    p4info=KINDS.with_suffix(".p4info.txtpb"), p4blob=KINDS.with_suffix(".json"), device_id=DEVICE
)
MAC = 0x020000000001
Work = Callable[[fy.Switch], Awaitable[None]]
Kind = TypeVar("Kind", bound=P4Entity)


async def read(switch: fy.Switch, query: Kind) -> list[Kind]:
    """Return all answers to a query; finsy's overloads are declared as coroutines, but are generators."""
    answer = cast(AsyncGenerator[Kind, None], switch.read(query))
    return [message async for message in answer]


def on_switch(running: Running, work: Work, options: fy.SwitchOptions = OPTIONS) -> None:
    """Run a controller's ready handler to its end."""

    async def once() -> None:
        finished = asyncio.Event()
        failed: list[BaseException] = []

        async def ready(switch: fy.Switch) -> None:
            try:
                await work(switch)
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                finished.set()

        switch = fy.Switch("softswitch", running.address, options(ready_handler=ready))
        task = asyncio.create_task(fy.Controller([switch]).run())
        await asyncio.wait_for(finished.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if failed:
            raise failed[0]

    asyncio.run(once())


def entry(port: int) -> fy.P4TableEntry:
    return fy.P4TableEntry(
        "by_mac", match=fy.Match(mac=MAC, port=1), action=fy.Action("counted", port=port), metadata=b"mine"
    )


def test_entries_groups_and_counters(running: Running) -> None:
    async def work(switch: fy.Switch) -> None:
        group = fy.P4MulticastGroupEntry(7, replicas=(1, P4Replica(2, instance=5)))
        await switch.write([+entry(2), +group])
        assert await read(switch, fy.P4TableEntry("by_mac")) == [entry(2)]
        assert await read(switch, fy.P4MulticastGroupEntry()) == [group]
        await switch.write([~entry(3)])
        query = fy.P4TableEntry("by_mac", match=fy.Match(mac=MAC, port=1))
        assert await read(switch, query) == [entry(3)]
        counters = await read(switch, fy.P4CounterEntry("seen"))
        assert len(counters) == 8
        assert await read(switch, fy.P4DirectCounterEntry("hits"))
        with pytest.raises(fy.P4ClientError) as failure:
            await switch.write([+entry(3), -fy.P4MulticastGroupEntry(8)])
        assert {place: error.canonical_code.name for place, error in failure.value.details.items()} == {
            0: "ALREADY_EXISTS",
            1: "NOT_FOUND",
        }
        await switch.write([-fy.P4MulticastGroupEntry(7)])
        await switch.delete_all()
        assert not await read(switch, fy.P4TableEntry("by_mac"))
        assert not await read(switch, fy.P4MulticastGroupEntry())

    on_switch(running, work)


def test_packets(running: Running) -> None:
    async def work(switch: fy.Switch) -> None:
        frame = bytes.fromhex("020000000001020000000002 88b5") + b"payload"
        await switch.write([fy.P4PacketOut(frame, padding=0, egress_port=4)])
        punt = fy.P4TableEntry("by_mac", match=fy.Match(mac=MAC, port=3), action=fy.Action("punt"))
        await switch.write([+punt])
        running.ports[3].inject(frame)
        packet = await asyncio.wait_for(anext(switch.read_packets()), 20)
        assert (packet.payload, packet["ingress_port"]) == (frame, 3)
        while not running.ports[4].output:
            await asyncio.sleep(0.01)
        assert list(running.ports[4].output) == [frame]

    on_switch(running, work)


def test_pipeline_is_found_again(running: Running) -> None:
    """A second session finds the pipeline by its cookie, with its entries."""

    async def first(switch: fy.Switch) -> None:
        await switch.write([+entry(2)])

    async def second(switch: fy.Switch) -> None:
        assert await read(switch, fy.P4TableEntry("by_mac")) == [entry(2)]

    on_switch(running, first)
    on_switch(running, second)
