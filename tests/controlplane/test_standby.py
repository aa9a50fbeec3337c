"""Controllers that stand by for each other, against a real switch process and real kernel sockets."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import yaml

from checkmate.job import following
from checkmate.job.files import read_job
from checkmate.job.following import JobFiles
from checkmate.job.schema import Job, Nic
from checkmate.wire.schedule import nic_of
from checkmate.wire.tag import Hello
from controlplane.serve import POLL_SECONDS
from controlplane.standby import Standby
from testbed.jobs import job_data
from tests.support.job_files import write
from tests.support.labs.live import LiveSwitch, live_switch, needs_root, targets
from tests.support.p4.frames import TAG, Frame
from topologies.crew import CHECKMATE, Crew, Member
from topologies.describe.job_files import Target
from topologies.describe.topology import CONTROLLER
from topologies.kernel import namespaces

pytestmark = [needs_root, pytest.mark.timeout(180)]
INCARNATION = 7
PAYLOAD = 400
NODES = 80
WHOLE = 2 * 2 * 8 * NODES
"""Fewer updates than a job of this many nodes takes with 8 channels: two entries for each stream.

Writing them takes about a second, as long as a controller takes to see a new file, so some of the kills hit.
"""
TRIES = 12
AWAY = (5.0, 6.5, 8.0, 9.5)
"""Seconds for which a switch is away, so that connecting to it takes longer and longer."""


def test_a_standby_waits_for_files_that_are_gone_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would have other job files than the primary meanwhile."""
    file = write(tmp_path, job_data())
    files = JobFiles([tmp_path])
    standby = Standby(files, files.jobs_to_serve(usable), lambda jobs: None, usable)
    files.note_served(files.jobs_to_serve(usable))
    file.unlink()
    assert standby.read_again()
    assert len(standby.jobs) == 1
    assert not files.have_changed()
    monkeypatch.setattr(following, "ABSENCE_SECONDS", 0.0)
    assert files.have_changed()
    assert standby.read_again()
    assert standby.jobs == []


def usable(_: Job) -> str:
    return ""


@pytest.fixture(scope="module")
def labs() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module", params=targets.args[1])
def live(request: pytest.FixtureRequest, labs: contextlib.ExitStack) -> LiveSwitch:
    target: Target = request.param
    return labs.enter_context(live_switch(target, f"standby{target[:4]}"))


@pytest.fixture
def crew(live: LiveSwitch) -> Iterator[Crew]:
    with Crew(live.lab) as lab_crew:
        yield lab_crew
    live.command("remove", live.job, status=None)


def stand_by(crew: Crew, name: str, *files: Path) -> Member:
    """Start a controller."""
    argv: list[str | Path] = [
        *CHECKMATE,
        "run",
        "--standby",
        "--insecure",
        "--no-view",
        *(files or (crew.lab.job_file,)),
    ]
    return crew.start(name, CONTROLLER, argv, good=(0,))


def serves(crew: Crew, member: Member) -> None:
    crew.wait(lambda: "serving" in member.output_text(), f"{member.name} to serve", 20)


def waits(crew: Crew, member: Member) -> None:
    crew.wait(lambda: "standing by" in member.output_text(), f"{member.name} to stand by", 20)
    time.sleep(0.5)  # it has looked at the switches
    assert "serving" not in member.output_text()


def said_back(member: Member, times: int) -> bool:
    return member.error_text().count("is back:") == times


def stream(job: Job, number: int, incarnation: int = INCARNATION) -> tuple[str, Nic, Hello]:
    """Return node, NIC and hello of one of the streams of the first rank."""
    shadow_id, channel = number % job.shards(0), number // job.shards(0)
    node = job.holder(0, shadow_id, 1)
    nic = node.nics[nic_of(channel, 0, len(node.nics))]
    return f"shadow{node.id}", nic, Hello(0, 0, shadow_id, channel, incarnation, 0)


@dataclass
class Training:
    """The first rank's tagged segments of one stream: the bytes sent, and received in order."""

    sent_bytes: int = 0
    received_bytes: int = 0


@contextlib.contextmanager
def trained(live: LiveSwitch, number: int, sock: socket.socket) -> Iterator[Training]:
    """Send tagged segments of a stream until the block ends; `sock` receives their copies."""
    job = read_job(live.job)
    _, _, hello = stream(job, number)
    source, destination = job.dp_groups[0].ranks[:2]
    with namespaces.entered(live.lab.namespace(f"rank{source.rank}")):
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        raw.bind(("data0", 0))
    training, stop = Training(), threading.Event()

    def send() -> None:
        while not stop.wait(0.005):
            place = struct.pack(
                "!IIHBB", training.sent_bytes, 1000, hello.shadow_id, hello.channel, INCARNATION
            )
            frame = Frame(
                str(destination.mac),
                tos=0x80,
                addresses=(str(source.ip), str(destination.ip)),
                options=TAG + place,
                payload=bytes(PAYLOAD),
            )
            raw.send(frame.encode())
            training.sent_bytes += PAYLOAD

    def receive() -> None:
        while not stop.is_set() or training.received_bytes < training.sent_bytes:
            try:
                training.received_bytes += len(sock.recv(1 << 16))
            except TimeoutError:
                return

    threads = [threading.Thread(target=work) for work in (send, receive)]
    for thread in threads:
        thread.start()
    try:
        yield training
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        raw.close()


def test_a_standby_takes_over_while_streams_connect(live: LiveSwitch, crew: Crew) -> None:
    job = read_job(live.job)
    first = stand_by(crew, "first")
    serves(crew, first)
    second = stand_by(crew, "second")
    waits(crew, second)
    connected = live.hello(*stream(job, 0))
    with trained(live, 0, connected) as training, ThreadPoolExecutor() as pool:
        crew.kill(first)
        began = time.monotonic()
        late = [pool.submit(live.hello, *stream(job, number)) for number in range(1, 2 * job.channels)]
        for hello in late:
            hello.result()
        took = time.monotonic() - began
        serves(crew, second)
    assert took < 5, "a new stream connects within 5 s"
    assert training.received_bytes == training.sent_bytes > 0, "nothing is lost"
    assert len(live.connected()) == len(late) + 1
    third = stand_by(crew, "third")
    waits(crew, third)
    crew.stop(second, seconds=20)
    serves(crew, third)
    assert len(live.connected()) == len(late) + 1, "whoever takes over takes over the streams"
    assert "taking over" in third.error_text() and "0 updates written" in third.output_text()
    crew.stop(third, seconds=20)


@pytest.mark.slow
def test_a_switch_that_restarts_gets_its_streams_back_beside_a_standby(live: LiveSwitch, crew: Crew) -> None:
    """Only its primary knows them, so that one must be first."""
    job = read_job(live.job)
    first = stand_by(crew, "first")
    serves(crew, first)
    second = stand_by(crew, "second")
    waits(crew, second)
    connected = [live.hello(*stream(job, number)) for number in range(job.channels)]
    for number, seconds in enumerate(AWAY):
        live.lab.stop_switch(live.lab.switches[0].name)
        time.sleep(seconds)
        live.restart_switch()
        crew.wait(partial(said_back, first, number + 1), "the primary to be back", 20)
        assert len(live.connected()) == len(connected)
        assert "serving" not in second.output_text()
        time.sleep(1)
    for sock in connected:
        sock.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_controller_that_is_killed_in_the_middle_of_a_batch_leaves_nothing_behind(
    live: LiveSwitch, crew: Crew, tmp_path: Path
) -> None:
    job = read_job(live.job)
    folder = tmp_path / "jobs"
    folder.mkdir()
    data = yaml.safe_load(live.job.read_text())
    data["fabric"] = str(live.job.parent / data["fabric"])
    (folder / "first.yaml").write_text(yaml.safe_dump(data))
    more = yaml.safe_dump(_large(data))
    before, names = stand_by(crew, "c0", folder), (f"c{number}" for number in count(1))
    serves(crew, before)
    connected = live.hello(*stream(job, 0))
    partial, generator = 0, random.Random(7)
    with trained(live, 0, connected) as training:
        for _ in range(TRIES):
            after = stand_by(crew, next(names), folder)
            waits(crew, after)
            (folder / "more.yaml").write_text(more)
            time.sleep(generator.uniform(0.5, 2.5))
            crew.kill(before)
            serves(crew, after)
            partial += 0 < update_count(after) < WHOLE
            time.sleep(1.5 * POLL_SECONDS)  # it has seen the new file, so the next one has the same files
            last = stand_by(crew, next(names), folder)
            waits(crew, last)
            crew.kill(after)
            serves(crew, last)
            assert update_count(last) == 0, "the one before has left no difference"
            (folder / "more.yaml").unlink()
            crew.wait(_has_left(last), "the job to go", 10)
            before = last
            if partial == 2:
                break
    assert partial, f"no controller was killed in the middle, in {TRIES} tries"
    assert training.received_bytes == training.sent_bytes > 0, "nothing is lost"
    crew.stop(before, seconds=20)


def _has_left(member: Member) -> Callable[[], bool]:
    return lambda: "job removed" in member.error_text()


def update_count(member: Member) -> int:
    """Return the number of updates that a controller has written when it took over."""
    (line,) = (line for line in member.output_text().splitlines() if " written in " in line)
    return int(line.partition(": ")[2].split()[0].replace(",", ""))


def _large(data: dict[str, object]) -> dict[str, object]:
    """Return a job beside another one, on addresses and ports of its own, that takes several batches."""
    ranks = [
        {
            "rank": n,
            "ip": f"10.9.0.{n + 1}",
            "mac": f"02:aa:00:00:00:{n:02x}",
            "switch": "tor",
            "mgmt": f"172.31.200.{n + 1}",
            "port": 40 + n,
        }
        for n in range(2)
    ]
    nodes = [
        {
            "id": n,
            "mgmt": f"172.31.201.{n + 1}:7000",
            "nics": [
                {"ip": f"10.9.1.{n + 1}", "mac": f"02:ab:00:00:00:{n:02x}", "switch": "tor", "port": 42 + n}
            ],
        }
        for n in range(NODES)
    ]
    return {
        "job": "more",
        "fabric": data["fabric"],
        "channels": 8,
        "dp_groups": [{"ranks": ranks}],
        "shadow_nodes": nodes,
    }


@pytest.mark.slow
def test_a_standby_with_other_job_files_waits_until_they_are_the_same(
    live: LiveSwitch, crew: Crew, tmp_path: Path
) -> None:
    data = yaml.safe_load(live.job.read_text())
    data["fabric"] = str(live.job.parent / data["fabric"])
    job_file = tmp_path / "job.yaml"
    job_file.write_text(yaml.safe_dump({**data, "channels": 1}))
    first = stand_by(crew, "first")
    serves(crew, first)
    second = stand_by(crew, "second", job_file)
    crew.wait(lambda: "has, or had, other job files" in second.error_text(), "the difference", 20)
    crew.kill(first)
    time.sleep(1.5)
    assert "serving" not in second.output_text()
    shutil.copy(job_file, tmp_path / "new.yaml")
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(data))
    (tmp_path / "new.yaml").replace(job_file)
    serves(crew, second)
    assert ": 0 updates written" in second.output_text()
    crew.stop(second, seconds=20)


def test_a_standby_refuses_what_it_could_not_serve(live: LiveSwitch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("job: [")
    assert "error:" in live.command("run", "--standby", broken, status=2)
    assert "--standby waits and serves" in live.command("run", "--standby", "--once", live.job, status=2)
