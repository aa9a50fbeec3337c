"""A switch that sends its controller nothing is named, with what may be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from controlplane import controller
from controlplane.hello_keys import HelloKeys
from controlplane.serve import Fleet
from testbed.jobs import job_data
from tests.support.switch_process import softswitch
from tests.support.waiting import wait_until

WARNING = "switch tor0: no packet of a shadow NIC has come in 0.3 s"


@pytest.fixture
def job() -> Iterator[Job]:
    """Yield a job on a switch that runs, and to which nothing is connected."""
    data = job_data()
    with softswitch("--no-p4") as switch:
        data["fabric"]["switches"][0] |= {"address": switch.address, "device_id": 1}
        yield of_data(Job, data)


@pytest.mark.parametrize("sends", [False, True])
def test_a_switch_that_sends_nothing_is_named_once_for_each_set_of_jobs(
    job: Job, sends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller, "SILENCE_SECONDS", 0.3)

    async def scenario() -> None:
        fleet = Fleet(HelloKeys(insecure=True))
        await fleet.start([])
        serving = asyncio.create_task(fleet.serve())
        for jobs in ([job], [replace(job, channels=job.channels + 1)]):  # a second set of jobs, later
            await fleet.change(jobs)
            (served,) = fleet.controllers.values()
            for _ in range(10):
                await asyncio.sleep(0.1)
                served._frames_read += int(sends)
            if not sends:
                await asyncio.to_thread(wait_until, lambda: WARNING in caplog.text)
                assert caplog.text.count(WARNING) == 1
                caplog.clear()
        assert not serving.done()
        await fleet.stop()
        serving.cancel()

    asyncio.run(scenario())
    assert WARNING not in caplog.text


def test_bmv2_needs_its_option(job: Job) -> None:
    switch, *_ = job.fabric.switches
    assert "--cpu-port" not in controller.silence(switch)
    words = controller.silence(replace(switch, target="bmv2"))
    assert words.endswith("BMv2 must have been started with --cpu-port 510, or it sends none.")
