"""P4Runtime sessions with a switch process without ports, which need neither packets nor root."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import trustme
from finsy import P4Schema
from finsy.p4client import P4Client, P4ClientError
from finsy.proto import p4r

from checkmate.cli import shell
from checkmate.job.schema import Switch, Tls
from checkmate.job.validation import of_data
from checkmate.keys.roles import Role, role_folder
from controlplane import forwarding, guard, replication, standby, streams, stub
from controlplane.election import Candidacy, ServerStanding
from controlplane.entities import Entity, Holdings, MulticastGroup, PortRate, Rate, Update
from controlplane.errors import AnotherPrimary, RefusalLost, SwitchUnreachable, WriteRefused, WrongPipeline
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec, compiled_files
from controlplane.p4runtime.session import SwitchSession
from controlplane.p4runtime.vacating import resume, vacate
from controlplane.streams import StreamConnection
from testbed.jobs import job as parsed_job
from testbed.jobs import switch as switch_data
from testbed.ports import free_port
from tests.support.keys import keys_of, served_job
from tests.support.switch_process import LOOP, softswitch

WRITER = Candidacy(7)
CODEC = Codec.for_target("softswitch")
EXAMPLES = Path(__file__).parent.parent.parent / "softswitch" / "examples"


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    with softswitch("--no-p4") as running_switch:
        yield running_switch


@contextlib.asynccontextmanager
async def open_session(switch: Switch) -> AsyncIterator[SwitchSession]:
    """Yield a primary session; the switch runs our program, without entries."""
    async with SwitchSession(switch, CODEC, candidacy=WRITER) as session:
        await session.ensure_pipeline(replace=True)
        yield session


def inserts(*entities: Entity) -> list[Update]:
    return [Update(None, entity) for entity in entities]


FIRST = forwarding.forward("02:00:00:00:00:01", 1)
READ = "table_entry['forwarding'].read(lambda entry: print(entry))"
SECOND = forwarding.forward("02:00:00:00:00:02", 2)


def test_what_is_written_is_read_back(switch: Switch) -> None:
    async def scenario() -> None:
        entities: Sequence[Entity] = [
            FIRST,
            forwarding.discard("02:00:00:00:00:09"),
            replication.mark(32),
            MulticastGroup(7, frozenset({(1, 0), (2, 1), (2, 2)})),
            replication.enter(5, IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2"), boundary=9),
            replication.replicate(9, 3, 1, group=7),
            stub.client(6, IPv4Address("10.0.0.3")),
            PortRate(7, Rate(packets=50, burst=100)),
            guard.permit(5, IPv4Address("10.0.0.1")),
            guard.host_port(5),
            guard.refuse(IPv4Address("10.0.0.1"), from_link=False),
        ]
        async with open_session(switch) as session:
            await session.write(inserts(*entities))
            assert await session.read() == Holdings.from_entities(entities)
            new = forwarding.forward("02:00:00:00:00:01", 5)
            await session.write([Update(FIRST, new), Update(entities[1], None)])
            holdings = await session.read()
            assert holdings.table("forwarding") == [new]

    LOOP.run_until_complete(scenario())


def test_a_refused_batch_is_undone_and_the_error_names_the_entity(switch: Switch) -> None:
    async def scenario() -> None:
        async with open_session(switch) as session:
            await session.write(inserts(FIRST))
            before = await session.read()
            group = MulticastGroup(3, frozenset({(1, 0)}))
            with pytest.raises(WriteRefused) as error:
                await session.write([*inserts(group, SECOND, FIRST), Update(None, replication.mark(1))])
            text = str(error.value)
            assert "refuses to insert forwarding[mac=02:00:00:00:00:01] -> forward(port=1)" in text
            assert "ALREADY_EXISTS" in text
            assert "is undone" in text
            assert await session.read() == before

    LOOP.run_until_complete(scenario())


def test_a_thousand_refusals_are_undone_too(switch: Switch) -> None:
    async def scenario() -> None:
        async with open_session(switch) as session:
            there = [forwarding.forward(f"02:00:00:00:{n >> 8:02x}:{n & 255:02x}", 1) for n in range(1000)]
            await session.write(inserts(*there))
            before = await session.read()
            new = forwarding.forward("02:00:00:00:ff:ff", 1)
            with pytest.raises(WriteRefused, match=r"forward\(port=1\) \(and \d+ more\): ALREADY_EXISTS"):
                await session.write(inserts(new, *there))
            assert await session.read() == before

    LOOP.run_until_complete(scenario())


def test_another_build_of_the_program_is_told(switch: Switch, tmp_path: Path) -> None:
    p4info, config = compiled_files("softswitch")
    new_config = tmp_path / "changed.json"
    new_config.write_text(config.read_text().replace('"id" : 0', '"id" :  0', 1))
    new_codec = Codec(P4Schema(p4info, new_config))

    async def scenario() -> None:
        async with SwitchSession(switch, new_codec, candidacy=WRITER) as session:
            await session.ensure_pipeline(replace=True)
            assert not await session.ensure_pipeline()
        async with SwitchSession(switch, CODEC, candidacy=WRITER) as session:
            with pytest.raises(WrongPipeline, match="another build"):
                await session.ensure_pipeline()
            assert await session.ensure_pipeline(replace=True)

    LOOP.run_until_complete(scenario())


def test_training_stops_before_a_program_is_replaced_and_goes_on_if_it_is_not(switch: Switch) -> None:
    network = Network([parsed_job()])
    node = StreamConnection(IPv4Address("10.1.0.3"), "02:00:00:00:00:03", 40000, 1)
    stream = streams.rewrite((1, 0, 0, 1), 2, node, parsed_job().fabric.switches[0].stub)
    entities = [stream, streams.expect(1, 2), FIRST, SECOND]

    async def scenario() -> None:
        async with open_session(switch) as session:
            assert await vacate(session, ()) is None, "it holds nothing"
            await session.write(inserts(*entities))
            vacated = await vacate(session, [SECOND["mac"]])
            assert vacated is not None
            assert vacated.holdings == Holdings.from_entities(entities)
            assert await session.read() == Holdings.from_entities([*entities[:2], SECOND]), (
                "copies still reach SECOND"
            )
            await resume(
                session, vacated, Holdings.from_entities([forwarding.forward("02:00:00:00:00:09", 3)])
            )
            more = forwarding.forward("02:00:00:00:00:09", 3)
            assert await session.read() == Holdings.from_entities([*entities, more]), "what is planned, too"

    LOOP.run_until_complete(scenario())
    assert forwarding.shadow_macs(network)


def test_a_server_that_says_nothing_is_unreachable() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            mute = of_data(Switch, switch_data("tor0", 0, port=silent.getsockname()[1]))
            with pytest.raises(SwitchUnreachable):
                async with SwitchSession(mute, CODEC, timeout=0.5, candidacy=WRITER):
                    pass

    LOOP.run_until_complete(scenario())


def test_nothing_is_loaded_over_another_program_unless_told(tmp_path: Path) -> None:
    async def scenario(switch: Switch) -> None:
        async with SwitchSession(switch, CODEC, candidacy=WRITER) as session:
            with pytest.raises(WrongPipeline, match=r"runs another program \(its tables: .*routes"):
                await session.ensure_pipeline()
            with pytest.raises(WrongPipeline, match="another program"):
                await session.check_pipeline()
            assert await session.ensure_pipeline(replace=True)
            assert not await session.ensure_pipeline()
            await session.check_pipeline()

    assert P4Schema(EXAMPLES / "l3_forward.p4info.txtpb").tables
    with softswitch(EXAMPLES / "l3_forward.json") as switch:
        LOOP.run_until_complete(scenario(switch))


def test_a_switch_without_a_program_gets_it(switch: Switch) -> None:
    async def scenario(fresh: Switch) -> None:
        async with SwitchSession(fresh, CODEC) as reader:
            with pytest.raises(WrongPipeline, match="runs no program"):
                await reader.check_pipeline()
        async with SwitchSession(fresh, CODEC, candidacy=WRITER) as session:
            assert await session.ensure_pipeline()
            assert len(await session.read()) == 0

    with softswitch("--no-p4") as fresh:
        LOOP.run_until_complete(scenario(fresh))


def test_there_is_one_primary(switch: Switch) -> None:
    async def scenario() -> None:
        async with SwitchSession(switch, CODEC, candidacy=WRITER):
            with pytest.raises(AnotherPrimary):
                async with SwitchSession(switch, CODEC, candidacy=WRITER):
                    pass
        async with SwitchSession(switch, CODEC, candidacy=WRITER) as successor:  # the first is gone
            await successor.ensure_pipeline()

    LOOP.run_until_complete(scenario())


def test_readers_may_be_many(switch: Switch) -> None:
    async def scenario() -> None:
        async with open_session(switch) as session:
            await session.write(inserts(FIRST))
            async with SwitchSession(switch, CODEC) as reader:
                assert (await reader.read()).table("forwarding") == [FIRST]

    LOOP.run_until_complete(scenario())


def test_an_unreachable_switch_is_told_in_time() -> None:
    async def scenario() -> None:
        nowhere = of_data(Switch, switch_data("tor0", 0, port=free_port()))
        start = time.monotonic()
        with pytest.raises(SwitchUnreachable, match="doesn't answer within"):
            async with SwitchSession(nowhere, CODEC, timeout=0.5, candidacy=WRITER):
                pass
        assert time.monotonic() - start < 3

    LOOP.run_until_complete(scenario())


def test_a_wrong_device_id_is_told(switch: Switch) -> None:
    async def scenario() -> None:
        wrong_switch = replace(switch, device_id=42)
        with pytest.raises(
            SwitchUnreachable, match=r"has no device 42 .*start it with --device-id 42, or write"
        ):
            async with SwitchSession(wrong_switch, CODEC, candidacy=WRITER) as session:
                await session.ensure_pipeline()

    LOOP.run_until_complete(scenario())


def test_a_wrong_device_id_is_told_by_bmv2_when_a_program_is_loaded(
    switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = grpc.aio.AioRpcError(
        grpc.StatusCode.UNKNOWN,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "Error when trying to assign device",
    )

    async def load(session: SwitchSession, request: p4r.SetForwardingPipelineConfigRequest) -> None:
        raise P4ClientError(refusal, "loading the program")

    async def scenario() -> None:
        with pytest.raises(
            SwitchUnreachable, match=r"has no device 1 .*start it with --device-id 1, or write"
        ):
            async with SwitchSession(switch, CODEC, candidacy=WRITER) as session:
                await session.ensure_pipeline(replace=True)

    monkeypatch.setattr(SwitchSession, "_load", load)
    LOOP.run_until_complete(scenario())


def test_a_switch_that_goes_away_is_told() -> None:
    async def scenario() -> None:
        with softswitch("--no-p4") as switch:
            session = SwitchSession(switch, CODEC, candidacy=WRITER)
            await session.__aenter__()
            await session.ensure_pipeline()
        with pytest.raises(SwitchUnreachable):
            await session.write(inserts(FIRST))
        with pytest.raises(SwitchUnreachable):
            async for _ in session.packets():
                pass
        await session.__aexit__(None, None, None)

    LOOP.run_until_complete(scenario())


def lose_refusals(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have gRPC's asyncio client not know why a switch has refused the first calls."""
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
    )
    remaining = times
    send = P4Client.send

    async def sends(client: P4Client, message: p4r.StreamMessageRequest) -> None:
        nonlocal remaining
        if remaining > 0:
            remaining -= 1
            raise P4ClientError(error, "send")
        await send(client, message)

    monkeypatch.setattr(P4Client, "send", sends)


@pytest.mark.parametrize(("times", "error"), [(1, None), (100, "refused arbitration: INTERNAL")])
def test_a_refusal_whose_reason_is_lost_is_asked_for_again(
    switch: Switch, monkeypatch: pytest.MonkeyPatch, times: int, error: str | None
) -> None:
    """If a switch refuses a call while it is being opened, gRPC's asyncio client may not know why."""

    async def scenario() -> None:
        async with open_session(switch) as session:
            await session.read()

    lose_refusals(monkeypatch, times)
    with pytest.raises(WriteRefused, match=error) if error else contextlib.nullcontext():
        LOOP.run_until_complete(scenario())


def looked(switch: Switch, times: int) -> list[ServerStanding | None]:
    """Return what a standby sees of a switch, once it has been told that many times."""
    standings: list[ServerStanding | None] = []
    watch = SimpleNamespace(see=lambda _, standing: standings.append(standing))

    async def scenario() -> None:
        change = asyncio.Event()
        looking = asyncio.ensure_future(standby._look(switch, watch, change))  # type: ignore[arg-type]
        for _ in range(times):
            await asyncio.wait_for(change.wait(), 10)
            change.clear()
        looking.cancel()

    LOOP.run_until_complete(scenario())
    return standings


@pytest.mark.parametrize("times", [1, 2])
def test_a_standby_takes_no_switch_for_gone_if_one_refusal_is_lost(
    switch: Switch, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    lose_refusals(monkeypatch, times)
    standings = looked(switch, 1)
    assert (standings[0] is None) == (times == 2)


def test_refusals_that_are_lost_one_by_one_are_no_end_of_a_switch(
    switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def beat(session: SwitchSession) -> None:
        await asyncio.sleep(0.05)
        raise RefusalLost("Internal error from Core")

    monkeypatch.setattr(SwitchSession, "heartbeat", beat)
    assert None not in looked(switch, 3)


def test_tls_with_client_certificates(tmp_path: Path) -> None:
    """Clients have the keys of a job; the switch's own certificate is of another authority."""
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / name for name in ("ca", "server", "server.key")}
    authority.cert_pem.write_to_path(files["ca"])
    server.cert_chain_pems[0].write_to_path(files["server"])
    server.private_key_pem.write_to_path(files["server.key"])
    job = served_job()
    keys_of(job, tmp_path)
    controller, trainer = (role_folder(tmp_path, job.job, role) for role in (Role.CONTROLLER, Role.TRAINER))
    arguments = ["--no-p4", "--grpc-server-ssl", "--grpc-server-cacert", str(controller / "ca.pem")]
    arguments += ["--grpc-server-cert", str(files["server"]), "--grpc-server-key", str(files["server.key"])]

    async def scenario(switch: Switch) -> None:
        tls = Tls(ca=files["ca"], cert=controller / "cert.pem", key=controller / "key.pem")
        async with open_session(replace(switch, tls=tls)) as session:
            await session.write(inserts(FIRST))
        for wrong in (None, Tls(ca=files["ca"])):
            with pytest.raises(SwitchUnreachable):
                async with SwitchSession(
                    replace(switch, tls=wrong), CODEC, timeout=1, candidacy=WRITER
                ) as session:
                    await session.read()
        tls = Tls(ca=files["ca"], cert=trainer / "cert.pem", key=trainer / "key.pem")
        with pytest.raises(WriteRefused, match="the client's certificate has checkmate:gpt/trainer"):
            async with SwitchSession(replace(switch, tls=tls), CODEC, candidacy=WRITER):
                pytest.fail("a trainer is not a controller")

    with softswitch(*arguments) as switch:
        LOOP.run_until_complete(scenario(switch))


@pytest.mark.skipif(
    not (shell.ENVIRONMENT / "bin" / "python").exists(),
    reason="p4runtime-shell has no environment: `checkmate shell --install` makes it",
)
def test_p4runtime_shell_reads_beside_us_and_writes_without_us(switch: Switch, tmp_path: Path) -> None:
    """This client shares no code with ours."""

    async def prepare() -> None:
        async with open_session(switch) as session:
            await session.write(inserts(FIRST))
            output = await asyncio.to_thread(_shell, switch, READ, tmp_path)
            assert "forward" in output
            assert re.search(r"02:00:00:00:00:01|x02(\\+x00){4}\\+x01", output)

    LOOP.run_until_complete(prepare())
    script = (
        "te = table_entry['forwarding'](action='forward'); te.match['mac'] = '02:00:00:00:00:02'; "
        "te.action['port'] = '2'; te.insert(); "
        "mc = multicast_group_entry(5); mc.add(1, 0); mc.add(2, 1); mc.insert()"
    )
    _shell(switch, script, tmp_path, primary=True)

    async def check() -> None:
        async with SwitchSession(switch, CODEC, candidacy=WRITER) as session:
            holdings = await session.read()
            assert SECOND in holdings.table("forwarding")
            assert holdings.groups[5].replicas == {(1, 0), (2, 1)}

    LOOP.run_until_complete(check())


def _shell(switch: Switch, script: str, folder: Path, *, primary: bool = False) -> str:
    """Return the output of p4runtime-shell for a line of input."""
    command, environment = shell.invocation(switch, primary=primary)
    result = subprocess.run(
        command,
        env={**environment, "IPYTHONDIR": str(folder)},
        input=f"{script}\nexit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Error" not in result.stderr + result.stdout, result.stdout + result.stderr
    return result.stdout
