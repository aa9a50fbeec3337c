"""`run --load` on several switches: all of them forward and copy after it, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from controlplane.entities import Holdings, Update
from controlplane.errors import WrongPipeline
from controlplane.hello_keys import HelloKeys
from controlplane.p4runtime import vacating
from controlplane.p4runtime.session import SwitchSession
from controlplane.serve import Fleet
from controlplane.streams import StreamConnection, expect, rewrite
from testbed.jobs import job_data
from tests.support.switch_process import LOOP, softswitch


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Yield a job on two switches that run."""
    data = job_data(switches=2)
    with ExitStack() as stack:
        for switch in data["fabric"]["switches"]:
            switch["address"] = stack.enter_context(softswitch("--no-p4")).address
            switch["device_id"] = 1
        yield of_data(Job, data)


async def connect_streams(fleet: Fleet) -> None:
    """Connect a stream on each switch that has one, as a controller does after a hello."""
    for controller in fleet.controllers.values():
        assert controller.session is not None
        for key, stream in list(controller.plan.streams.items())[:1]:
            node = StreamConnection(stream.nic.ip, stream.nic.mac, 40000, 1)
            stub = fleet.network.switches[controller.switch.name].stub
            entries = [rewrite(key, 3, node, stub), expect(key[0], 3)]
            await controller.session.write([Update(None, entry) for entry in entries])


async def holdings(fleet: Fleet) -> dict[str, Holdings]:
    return {
        name: await controller.session.read()
        for name, controller in fleet.controllers.items()
        if controller.session
    }


async def served(job: Job) -> dict[str, Holdings]:
    """Return what the switches hold with streams connected, after a controller that adds what is missing."""
    fleet = Fleet(HelloKeys(insecure=True))
    reports = await fleet.start([job])
    if sum(report.updates for report in reports):
        await connect_streams(fleet)
    holdings_by_switch = await holdings(fleet)
    await fleet.stop()
    return holdings_by_switch


async def refuse_load(job: Job, patch: pytest.MonkeyPatch) -> None:
    """Load the program; the second switch refuses it."""
    ensure = SwitchSession.ensure_pipeline

    async def ensured(session: SwitchSession, *, replace: bool = False) -> bool:
        if replace and session.switch.name == "tor1":
            raise WrongPipeline("tor1 refuses the program")
        return await ensure(session, replace=replace)

    patch.setattr(SwitchSession, "ensure_pipeline", ensured)
    with pytest.raises(WrongPipeline):
        await Fleet(HelloKeys(insecure=True)).start([job], replace=True)


async def interrupted(job: Job, patch: pytest.MonkeyPatch) -> None:
    """Load the program; Ctrl-C comes while queues run empty."""
    patch.setattr(vacating, "QUEUE_SECONDS", 30.0)
    task = asyncio.create_task(Fleet(HelloKeys(insecure=True)).start([job], replace=True))
    await asyncio.sleep(0.5)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def loaded(job: Job, patch: pytest.MonkeyPatch) -> None:
    """Load the program."""
    fleet = Fleet(HelloKeys(insecure=True))
    reports = await fleet.start([job], replace=True)
    assert all(report.loaded and report.updates for report in reports)
    await fleet.stop()


@pytest.mark.parametrize("how", [refuse_load, interrupted, loaded])
def test_all_switches_hold_what_they_held(
    job: Job, how: Callable[[Job, pytest.MonkeyPatch], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        before = await served(job)
        assert any(switch_holdings.table("streams") for switch_holdings in before.values())
        assert all(switch_holdings.table("forwarding") for switch_holdings in before.values())
        monkeypatch.setattr(vacating, "QUEUE_SECONDS", 0.0)
        with monkeypatch.context() as patch:
            await how(job, patch)  # type: ignore[misc]
        fleet = Fleet(HelloKeys(insecure=True))
        reports = await fleet.start([job])
        assert [report.updates for report in reports] == [0, 0], "nothing was missing"
        assert await holdings(fleet) == before
        await fleet.stop()

    LOOP.run_until_complete(scenario())
