"""Changes of jobs that one of several switches refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from checkmate.job.schema import Job
from controlplane.controller import SwitchController
from controlplane.errors import WriteRefused
from controlplane.hello_keys import HelloKeys
from controlplane.network import Network
from controlplane.reconciling import Reconciliation
from controlplane.serve import Fleet
from testbed.jobs import job


class FleetSwitch(SwitchController):
    """A switch without a session, which refuses the changes with these numbers."""

    refused: frozenset[int] = frozenset()
    changes = 0

    async def apply(self, network: Network) -> Reconciliation:
        """Apply, unless it is to refuse."""
        self.changes += 1
        if self.changes in self.refused:
            raise WriteRefused(f"{self.switch.name} refuses")
        return await super().apply(network)


class FixedKeys(HelloKeys):
    """Keys of each job that is asked for."""

    def secrets(self, jobs: Any) -> dict[str, bytes]:
        """Return a key for each job."""
        return {one_job.job: one_job.job.encode() for one_job in jobs}


def fleet_of(one_job: Job) -> tuple[Fleet, list[FleetSwitch]]:
    """Return a fleet whose switches serve a job."""
    fleet = Fleet(FixedKeys())
    fleet.prepare([one_job])
    for switch in fleet.controllers.values():
        switch.__class__ = FleetSwitch
    return fleet, [cast(FleetSwitch, switch) for switch in fleet.controllers.values()]


def test_a_refused_change_leaves_all_switches_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Also those after one that refuses to go back: it is connected to, read and written again."""

    async def scenario() -> None:
        served = job(switches=3)
        fleet, switches = fleet_of(served)
        assert len(switches) == 3
        before = fleet.network
        switches[0].refused = frozenset({2})  # to go back
        switches[2].refused = frozenset({1})
        changed = replace(served, channels=served.channels + 1)
        with pytest.raises(WriteRefused, match=switches[2].switch.name):
            await fleet.change([changed, job("another", switches=3, number=1)])
        assert fleet.network is before
        assert [switch.network is before for switch in switches] == [True, True, True]
        assert switches[0]._must_reconnect.is_set()
        assert "going back to the jobs before" in caplog.text
        assert fleet._hello_keys == {served.job: served.job.encode()}

    asyncio.run(scenario())
