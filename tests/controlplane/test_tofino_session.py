"""The control plane for a Tofino, with a real P4Runtime server: the embedded target's."""

from __future__ import annotations

import shutil
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from finsy import P4Schema

import p4src
from checkmate.job.schema import Job
from checkmate.job.tofino.ports import resolve
from checkmate.job.validation import of_data
from controlplane import stub
from controlplane.election import Candidacy
from controlplane.entities import Holdings, PortRate, Rate, TableEntry, Update, difference
from controlplane.errors import WriteRefused, WrongPipeline
from controlplane.network import Network
from controlplane.p4runtime import codec as codecs
from controlplane.p4runtime.codec import Codec, compiled_files
from controlplane.p4runtime.session import SwitchSession
from controlplane.plan import plan_switch
from controlplane.serve import Fleet
from controlplane.status import read_status
from controlplane.streams import lose
from controlplane.tofino.device_config import NotCompiled
from p4src.tofino import P4INFO
from testbed.jobs import job_data, tofino_job_data
from tests.support.controlplane.tofino import write_compiled
from tests.support.switch_process import LOOP, softswitch

WRITER = Candidacy(7)


def test_an_entry_says_what_it_counted() -> None:
    codec = Codec(P4Schema(*compiled_files("softswitch")), server="stratum")
    message = codec.encode(lose((300, 2, 1, 3)))
    message.table_entry.counter_data.packet_count = 7
    message.table_entry.counter_data.byte_count = 7000
    match, packets, nbytes = codec.decode_direct_counter(message)
    assert (packets, nbytes) == (7, 7000)
    assert match == {"boundary": 300, "channel": 2, "shadow_id": 1, "replication_id": 3}
    assert codec.read_direct_counters("lost", [])[0].table_entry.HasField("counter_data")


def test_all_ways_of_asking_report_the_same() -> None:
    p4info, config = compiled_files("softswitch")
    by_entry = Codec(P4Schema(p4info, config), server="stratum")
    one_by_one = Codec(P4Schema(p4info, config), server="pi")
    with softswitch("--no-p4") as switch:
        data = job_data(nodes=2, channels=2)
        data["fabric"]["switches"][0]["address"] = switch.address
        network = Network([of_data(Job, data)])

        async def ask_all_ways() -> None:
            plan = plan_switch(network, "tor0", Holdings())
            async with SwitchSession(switch, Codec.for_switch(switch), candidacy=WRITER) as session:
                await session.ensure_pipeline()
                await session.write(difference(Holdings(), plan.holdings))
                usual = await read_status(session, network)
            async with SwitchSession(switch, by_entry) as session:
                assert await read_status(session, network) == usual
                reads = by_entry.read_direct_counters("lost", [])
                counts = [by_entry.decode_direct_counter(m) async for m in session.read_entities(reads)]
            async with SwitchSession(switch, one_by_one) as session:
                assert await read_status(session, network) == usual
                reads = one_by_one.read_direct_counters("lost", (await session.read()).table("lost"))
                assert all(query.direct_counter_entry.table_entry.match for query in reads)
                again = [one_by_one.decode_direct_counter(m) async for m in session.read_entities(reads)]
            assert again == counts
            assert len(counts) == len(plan.streams)
            assert {len(match) for match, *_ in counts} == {4}

        LOOP.run_until_complete(ask_all_ways())


def test_pis_unread_rates_are_written_again_and_removed() -> None:
    """PI returns no indexed meters of a Tofino, so each start writes every port's rate."""
    limited = PortRate(5, Rate(packets=50, burst=100))
    client = stub.client(5, IPv4Address("10.0.0.3"))
    unread = Codec(P4Schema(*compiled_files("softswitch")), server="pi")
    with softswitch("--no-p4") as switch:

        async def scenario() -> None:
            target = Holdings.from_entities([client, limited])
            async with SwitchSession(switch, unread, candidacy=WRITER) as session:
                await session.ensure_pipeline()
                holdings = await session.read()
                assert len(holdings.rates) == 512
                await session.write(difference(holdings, target))
                again = difference(await session.read(), target)
                assert [u.entity for u in again if u.verb == "modify"] == [limited]
                assert {u.verb for u in again} == {"modify", "delete"}
                assert not any(isinstance(u.entity, TableEntry) for u in again)
                updates = [*again[:1], Update(None, client)]
                with pytest.raises(WriteRefused, match="is undone"):
                    await session.write(updates)
            async with SwitchSession(switch, Codec.for_switch(switch), candidacy=WRITER) as session:
                assert await session.read() == target
            async with SwitchSession(switch, unread, candidacy=WRITER) as session:
                await session.write(difference(await session.read(), Holdings()))
            async with SwitchSession(switch, Codec.for_switch(switch), candidacy=WRITER) as session:
                assert len(await session.read()) == 0

        LOOP.run_until_complete(scenario())


def test_an_unknown_rate_is_never_written() -> None:
    unknown, rate = PortRate(5, None), PortRate(5, Rate(packets=50, burst=100))
    assert difference(Holdings.from_entities([rate]), Holdings.from_entities([unknown])) == []
    assert Update(unknown, rate).undone() == Update(rate, rate)
    assert Codec.for_target("tofino", "pi").decode_all([]).rates[rate.key] == unknown
    assert not Codec.for_target("tofino", "stratum").decode_all([]).rates


@pytest.fixture
def same_p4info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use v1model's P4Info as the Tofino's, so that the embedded target runs "the program"."""
    shutil.copy(compiled_files("bmv2")[0], tmp_path / P4INFO)
    usual = p4src.artifacts
    monkeypatch.setattr(codecs, "artifacts", lambda t="bmv2": tmp_path if t == "tofino" else usual(t))
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path / "sde"))
    return tmp_path


def test_a_job_with_front_panel_names_is_installed(same_p4info: Path) -> None:
    """The compiler's output is not needed, because the switch already runs the program."""
    with softswitch("--no-p4") as switch:
        data = tofino_job_data(nodes=2)
        data["fabric"]["switches"][0]["address"] = switch.address
        assert resolve(data) == []
        job = of_data(Job, data)

        async def installed() -> None:
            with pytest.raises(NotCompiled, match="python -m p4src.compile tofino"):
                await Fleet().start([job])
            async with SwitchSession(switch, Codec.for_switch(switch), candidacy=WRITER) as session:
                await session.ensure_pipeline()
            fleet = Fleet()
            (report,) = await fleet.start([job])
            await fleet.stop()
            assert (report.updates > 10, report.loaded) == (True, False)
            async with SwitchSession(switch, Codec.for_switch(switch)) as session:
                holdings = await session.read()
            assert {e["port"] for e in holdings.table("forwarding") if e.action == "forward"} >= {
                128,
                136,
                144,
            }
            assert {port for port, _ in holdings.groups[1].replicas} == {128 + 8 * i for i in range(7)}
            (job_switch,) = job.fabric.switches
            async with SwitchSession(job_switch, Codec.for_switch(job_switch)) as session:
                status = await read_status(session, Network([job]))
            assert len(status.streams) == 4

        LOOP.run_until_complete(installed())


def test_the_packed_program_is_what_is_loaded(same_p4info: Path) -> None:
    """The embedded target needs BMv2's JSON, so it refuses a program packed for a Tofino."""
    write_compiled(same_p4info / "sde", "tofino", b"binary", b"{}")
    with softswitch("--no-p4") as switch:
        data = tofino_job_data()
        data["fabric"]["switches"][0]["address"] = switch.address
        resolve(data)
        job = of_data(Job, data)

        async def start() -> None:
            with pytest.raises(WrongPipeline, match="refuses the program"):
                await Fleet().start([job])

        LOOP.run_until_complete(start())
