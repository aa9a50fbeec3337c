"""Plans from jobs: the entries implement any jobs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from controlplane import plan as planning
from controlplane import streams
from controlplane.entities import (
    FLOOD_GROUP,
    WRITE_ORDER,
    Entity,
    Holdings,
    MulticastGroup,
    Update,
    batches,
    difference,
    mac_number,
)
from controlplane.guard import Counts, refusals
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.plan import ADVICE, SwitchPlan, excesses, fabric_excesses, limits, plan_switch
from controlplane.remove import holdings_without
from testbed.jobs import job, job_data
from tests.support.controlplane.planned import connect_all
from tests.support.jobs import lists_of_jobs

CODEC = Codec.for_target("softswitch")
few = settings(max_examples=40)


def everything(jobs: list[Job]) -> dict[str, SwitchPlan]:
    return planning.plan(jobs)


def applied(holdings: Holdings, updates: list[Update]) -> Holdings:
    result = holdings.copy()
    for update in updates:
        if update.new is None:
            result.drop(update.entity)
        else:
            result.put(update.new)
    return result


@given(lists_of_jobs())
@few
def test_each_stream_is_replicated_once_by_its_boundary_ranks_own_switch(jobs: list[Job]) -> None:
    plans = everything(jobs)
    network = Network(jobs)
    expected = {
        (s.boundary.job, s.boundary.number, s.channel, s.shadow_id, s.replication_id): s
        for s in network.streams
    }
    planned = {}
    for plan in plans.values():
        for stream in plan.streams.values():
            assert stream.boundary.switch == plan.switch
            planned[
                (
                    stream.boundary.job,
                    stream.boundary.number,
                    stream.channel,
                    stream.shadow_id,
                    stream.replication_id,
                )
            ] = stream
    assert planned == expected


@given(lists_of_jobs())
@few
def test_a_group_has_the_training_port_and_each_holders_port(jobs: list[Job]) -> None:
    network = Network(jobs)
    for name, plan in everything(jobs).items():
        by_boundary = plan.boundary_ids
        pairs = {b.pair for b in network.boundaries if b.switch == name}
        assert len(set(by_boundary.values())) == len(pairs)
        for entry in plan.holdings.table("replication"):
            here = [
                s
                for key, s in plan.streams.items()
                if key[:3] == (entry["boundary"], entry["channel"], entry["shadow_id"])
            ]
            boundary = here[0].boundary
            assert {s.boundary for s in here} == {boundary}, "one boundary for its addresses and shadow id"
            (of,) = (e for e in plan.holdings.table("boundaries") if e["boundary"] == entry["boundary"])
            key = boundary.source.port, int(boundary.source.ip), int(boundary.destination.ip)
            assert key == (of["port"], of["source"], of["destination"])
            expected = {(network.port_towards(name, boundary.destination), 0)}
            expected |= {(network.port_towards(name, s.nic), s.replication_id) for s in here}
            assert plan.holdings.groups[entry["group"]].replicas == expected


@given(lists_of_jobs())
@few
def test_groups_are_deduplicated_by_content(jobs: list[Job]) -> None:
    for plan in everything(jobs).values():
        contents = [group.replicas for number, group in plan.holdings.groups.items() if number != FLOOD_GROUP]
        assert len(set(contents)) == len(contents)


@given(lists_of_jobs())
@few
def test_following_the_ports_leads_from_every_switch_to_every_host(jobs: list[Job]) -> None:
    network = Network(jobs)
    plans = everything(jobs)
    tables = {
        name: {entry["mac"]: entry for entry in plan.holdings.table("forwarding")}
        for name, plan in plans.items()
    }
    for start in plans:
        for host in network.interfaces:
            here, hops = start, 0
            while True:
                port = tables[here][mac_number(host.mac)]["port"]
                hops += 1
                if port == host.port and here == host.switch:
                    break
                here = network.links(here)[port]
                assert hops <= len(plans)


@given(lists_of_jobs())
@few
def test_the_guard_lets_hosts_and_stubs_send_from_where_they_are(jobs: list[Job]) -> None:
    network = Network(jobs)
    plans = everything(jobs)
    for stream in network.streams:
        stub = network.switches[stream.boundary.switch].stub
        here = stream.boundary.switch
        while here != stream.nic.switch:  # the way of copies
            port = network.port_towards(here, stream.nic)
            assert port is not None
            here, port = network.links(here)[port], network.far_port(here, port)
            assert guarded(plans[here], port, int(stub.ip)), "a copy"
    for host in network.interfaces:
        for name, plan in plans.items():
            port = network.arrival_port(name, host)
            assert port is not None
            for source in (host.ip, *host.addresses):
                assert guarded(plan, port, int(source))
                assert not guarded(plan, UNUSED_PORT, int(source))
                for neighbour in network.interfaces:
                    if neighbour.switch == name and neighbour.port != port:
                        assert not guarded(plan, neighbour.port, int(source))
    for name, plan in plans.items():
        for switch in network.switches.values():
            for host in network.interfaces:
                if host.switch == name:
                    assert not guarded(plan, host.port, int(switch.stub.ip))
            assert not guarded(plan, UNUSED_PORT, int(switch.stub.ip))


UNUSED_PORT = 500


def test_what_the_guard_has_refused_names_host_and_remedy() -> None:
    job = of_data(Job, job_data(switches=2))
    network = Network([job])
    rank = next(rank for rank in job.dp_groups[0].ranks if rank.switch == "tor0")
    (link, *_) = network.links("tor0")
    stub = network.switches["tor1"].stub.ip
    counts: list[Counts] = [
        ({"port": rank.port}, 7, 700),
        ({"port": link}, 9, 900),
        ({"address": int(rank.ip), "from_link": 0}, 2, 200),
        ({"address": int(stub), "from_link": 1}, 3, 300),
        ({"address": int(stub), "from_link": 0}, 0, 0),
        ({"address": 7, "from_link": 0}, 8, 800),  # of a job that these commands were not given
    ]
    at_port, of_rank, of_stub = refusals(network, "tor0", counts)
    assert str(at_port).startswith(
        f"7 packets refused at port {rank.port}, where rank {rank.rank} of demo has only {rank.ip}"
    )
    assert str(of_rank).startswith(
        f"2 packets from {rank.ip}, the address of rank {rank.rank} of demo, refused at other ports than its"
    )
    assert (of_stub.host, of_stub.packets) == ("the stub of switch tor1", 3)


def guarded(plan: SwitchPlan, port: int, address: int) -> bool:
    """Return whether the guard lets an address in at a port, as p4src/include/guard.p4 decides."""
    keys = {(entry.table, entry.match): entry.action for entry in plan.holdings.entries.values()}
    if ("sources", (("port", port), ("address", address))) in keys:
        return True
    kind = keys.get(("guarded_ports", (("port", port),)))
    if kind == "host_port":
        return False
    return ("guarded_addresses", (("address", address), ("from_link", int(kind == "link_port")))) not in keys


@given(lists_of_jobs())
@few
def test_flooding_reaches_every_switch_once(jobs: list[Job]) -> None:
    network = Network(jobs)
    for start in network.switches:
        visited: list[str] = []
        queue: list[tuple[str, str | None]] = [(start, None)]
        while queue:
            here, came_from = queue.pop()
            visited.append(here)
            assert len(visited) <= len(network.switches)
            queue += [
                (far, here)
                for port in network.tree_ports(here)
                if (far := network.links(here)[port]) != came_from
            ]
        assert sorted(visited) == sorted(network.switches)


@given(lists_of_jobs())
@few
def test_every_entity_survives_p4runtime(jobs: list[Job]) -> None:
    network = Network(jobs)
    for plan in everything(jobs).values():
        holdings = connect_all(network, plan)
        for entity in _all(holdings):
            assert CODEC.decode(CODEC.encode(entity)) == entity


@given(lists_of_jobs())
@few
def test_planning_again_changes_nothing_and_keeps_connected_streams(jobs: list[Job]) -> None:
    network = Network(jobs)
    for name, plan in everything(jobs).items():
        holdings = connect_all(network, plan)
        again = plan_switch(network, name, holdings)
        assert difference(holdings, again.holdings) == []


@given(lists_of_jobs(), st.data())
@few
def test_a_job_comes_and_goes_without_touching_the_others(jobs: list[Job], data: st.DataObject) -> None:
    leaving_job = data.draw(st.sampled_from(jobs))
    rest = Network([job for job in jobs if job is not leaving_job])
    for name, plan in everything(jobs).items():
        holdings = connect_all(Network(jobs), plan)
        smaller = plan_switch(rest, name, holdings).holdings if name in rest.switches else Holdings()
        updates = difference(holdings, smaller)
        removals = {update.old for update in updates if update.new is None}
        other_keys = {key for key, stream in plan.streams.items() if stream.boundary.job != leaving_job.job}
        for entry in holdings.table("streams"):
            assert (entry in removals) == (streams.stream_key(entry) not in other_keys)
        for entry in holdings.table("replication"):
            assert (entry in removals) == (entry["boundary"] not in {key[0] for key in other_keys})
        if rest.jobs:
            assert holdings_without(holdings, Network([leaving_job]), name) == smaller
        back = plan_switch(Network(jobs), name, smaller).holdings
        assert all(u.old is None or isinstance(u.entity, MulticastGroup) for u in difference(smaller, back))


@given(lists_of_jobs(), lists_of_jobs())
@few
def test_the_difference_leads_from_any_state_to_any_other(before: list[Job], after: list[Job]) -> None:
    start, end = everything(before), everything(after)
    for name in start.keys() & end.keys():
        holdings = connect_all(Network(before), start[name])
        target = plan_switch(Network(after), name, holdings).holdings
        updates = difference(holdings, target)
        assert applied(holdings, updates) == target
        undone = [update.undone() for update in reversed(updates)]
        assert applied(target, undone) == holdings


@given(lists_of_jobs(), lists_of_jobs())
@few
def test_writing_is_ordered_so_that_no_connected_stream_misses_a_segment(
    before: list[Job], after: list[Job]
) -> None:
    start, end = everything(before), everything(after)
    for name in start.keys() & end.keys():
        target = plan_switch(Network(after), name, start[name].holdings).holdings
        updates = difference(start[name].holdings, target)
        puts = [WRITE_ORDER.index(u.entity.feature) for u in updates if u.new is not None]
        drops = [WRITE_ORDER.index(u.entity.feature) for u in updates if u.new is None]
        assert puts == sorted(puts)
        assert drops == sorted(drops, reverse=True)
        pieces = batches(updates, 7)
        assert list(itertools.chain.from_iterable(pieces)) == updates
        for batch in pieces:
            assert len(batch) <= 7
            assert len({(u.entity.feature, u.new is None) for u in batch}) == 1


def test_an_edited_job_writes_the_difference_only() -> None:
    plan = everything([job(channels=1)])["tor0"]
    holdings = connect_all(Network([job(channels=1)]), plan)
    wider = plan_switch(Network([job(channels=2)]), "tor0", holdings)
    updates = difference(holdings, wider.holdings)
    assert {update.entity.feature for update in updates} == {"streams", "groups", "replication"}
    assert all(update.old is None for update in updates)
    assert {"lost", "replication"} == {getattr(u.entity, "table", "replication") for u in updates}


def test_a_moved_nic_loses_its_stream() -> None:
    plan = everything([job()])["tor0"]
    holdings = connect_all(Network([job()]), plan)
    data = data_of(job())
    data["shadow_nodes"][0]["nics"][0]["mac"] = "02:00:00:00:ff:ff"
    again = plan_switch(Network([of_data(Job, data)]), "tor0", holdings)
    remaining = {streams.stream_key(entry) for entry in again.holdings.table("streams")}
    ip = job().shadow_nodes[0].nics[0].ip
    assert remaining == {key for key, stream in plan.streams.items() if stream.nic.ip != ip}
    assert len(remaining) < len(plan.streams)


def test_more_than_a_switch_holds_is_refused_by_what_there_is_too_much_of() -> None:
    plan = everything([job(groups=2, ranks=2, nodes=3, channels=3)])["tor0"]
    sizes = {**limits("softswitch"), "replication": 35, "streams": 36}
    (excess,) = excesses(plan, "softswitch", sizes)
    assert (excess.resource, excess.demand, excess.limit) == ("replication entries", 36, 35)
    assert "36 replication entries needed, it holds 35" in str(excess)
    assert str(excess).endswith(
        "use fewer channels or shadow nodes, or let DP groups begin and end with ranks at other switches"
    )


def test_more_addresses_than_a_switch_holds_are_refused_as_such() -> None:
    plan = everything([job(ranks=2, nodes=1, nics=1, further=2)])["tor0"]
    (excess,) = excesses(plan, "softswitch", {**limits("softswitch"), "sources": 8})
    assert (excess.resource, excess.demand, excess.limit) == ("sources entries", 9, 8)
    assert "use fewer addresses" in str(excess)


@given(lists_of_jobs())
@few
def test_a_switch_has_no_more_replication_entries_than_streams(jobs: list[Job]) -> None:
    """So a table of replication that is as large as that of streams is never the limit."""
    for plan in everything(jobs).values():
        usage = plan.usage()
        assert usage.get("replication", 0) <= usage["streams"] == usage.get("lost", 0)


def test_entities_print_as_a_person_reads_them() -> None:
    plan = everything([job(nodes=1, channels=1)])["tor0"]
    lines = {str(entity) for entity in _all(plan.holdings)}
    assert "stub[address=10.255.0.1] -> punt_segment()" in lines
    assert "group 1 -> ports 1 2 3 4 5" in lines
    assert "boundaries[port=1 source=10.0.0.1 destination=10.0.0.2] -> enter(boundary=0)" in lines
    assert "sources[port=1 address=10.0.0.1] -> permit()" in lines
    assert "port 7 -> 50 packets a second for strangers" in lines


def _all(holdings: Holdings) -> list[Entity]:
    return list(holdings)


LARGE: dict[str, Any] = {"groups": 2, "ranks": 8, "nodes": 4, "channels": 2, "replicas": 2, "switches": 4}
SMALLER: dict[str, list[dict[str, Any]]] = {
    "fewer channels": [{"channels": 1}],
    "shadow nodes": [{"nodes": 2}],
    "replicas": [{"replicas": 1}],
    "fewer addresses": [{"further": 0}],
    "spread hosts over more switches": [{"switches": 8}],
    "begin and end with ranks at other switches": [{"turned": 2}],
    "of the fabric": [{"ranks": 4}, {"nodes": 2}],
    "a job file can't change that": [],
}
"""By words of the advice: what is done in a job that follows it."""


@pytest.mark.parametrize("resource", ADVICE)
def test_who_follows_the_advice_needs_fewer_entries(resource: str) -> None:
    before = usage_of(resource)
    followed = [
        change for words, changes in SMALLER.items() if words in ADVICE[resource] for change in changes
    ]
    assert bool(followed) == ("can't" not in ADVICE[resource])
    for change in followed:
        assert usage_of(resource, **change) < before, change


def usage_of(resource: str, turned: int = 0, **change: Any) -> int:
    """Return what `tor0` needs for a job whose groups begin some ranks later than usual."""
    data = job_data(**LARGE | {"further": 2} | change)
    for group in data["dp_groups"]:
        group["ranks"] = [*group["ranks"][turned:], *group["ranks"][:turned]]
    return everything([of_data(Job, data)])["tor0"].usage().get(resource, 0)


def test_every_limit_has_an_advice() -> None:
    assert ADVICE.keys() == limits("softswitch").keys()


def test_a_fabric_that_is_too_large_is_refused_before_entries_are_made() -> None:
    large = Network([job(**LARGE | {"further": 1})])
    plan = plan_switch(large, "tor0", Holdings())
    capacity = {**limits("softswitch"), "forwarding": 10, "guarded_addresses": 10}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "limits", lambda _: capacity)
        excesses = fabric_excesses(large)
    assert [(excess.resource, excess.demand, excess.other_switches) for excess in excesses] == [
        ("forwarding entries", plan.usage()["forwarding"], 3),
        ("guarded_addresses entries", plan.usage()["guarded_addresses"], 3),
    ]
    assert str(excesses[0]).startswith("switch tor0 and 3 others (softswitch): ")
