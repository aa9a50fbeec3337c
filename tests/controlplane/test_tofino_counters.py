"""Direct counters as a Tofino's P4Runtime servers tell them: with the entries. On a real P4Runtime server."""

from __future__ import annotations

from finsy import P4Schema

from checkmate.schema import Job
from controlplane.codec import Codec, compiled
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.plan import plan_switch
from controlplane.reconcile import difference
from controlplane.session import Session
from controlplane.status import read_status
from tests.controlplane.test_session import LOOP, softswitch
from tests.jobs_made import job_data


def test_both_ways_of_asking_say_the_same() -> None:
    p4info, config = compiled("softswitch")
    by_entry = Codec(P4Schema(p4info, config), counters_by_entry=True)
    with softswitch("--no-p4") as switch:
        data = job_data(nodes=2, channels=2)
        data["fabric"]["switches"][0]["address"] = switch.address
        network = Network([Job.model_validate(data)])

        async def told() -> None:
            plan = plan_switch(network, "tor0", Holdings())
            async with Session(switch, Codec.for_switch(switch)) as session:
                await session.ensure_pipeline()
                await session.write(difference(Holdings(), plan.holdings))
                usual = await read_status(session, network)
            async with Session(switch, by_entry, primary=False) as session:
                assert await read_status(session, network) == usual
                asked = [by_entry.read_direct_counters("lost")]
                found = [by_entry.decode_direct_counter(m) async for m in session.read_entities(asked)]
            assert len(found) == len(plan.streams)
            assert {len(counted.match) for counted in found} == {4}

        LOOP.run_until_complete(told())
