"""No question to another host takes longer than its deadline, also if names are not looked up."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkmate.doctor import clocks, peers, reading
from checkmate.doctor.deadlines import within
from checkmate.doctor.findings import Outcome
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from testbed.jobs import job
from tests.support.cli import COMMAND

GPT = job("gpt", nodes=2)


@pytest.fixture
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look-ups wait until the test ends."""
    end = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        end.wait(20)
        raise OSError("no name server")

    for name in ("gethostbyname", "getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, look_up)
    monkeypatch.setattr(peers, "SECONDS", 0.2)
    monkeypatch.setattr(reading, "_NAME_SECONDS", 0.2)
    yield
    end.set()


def took(asks: Callable[[], object]) -> float:
    start = time.monotonic()
    asks()
    return time.monotonic() - start


def with_switch_at(address: str) -> Job:
    switch, *_ = GPT.fabric.switches
    return replace(GPT, fabric=replace(GPT.fabric, switches=(replace(switch, address=address),)))


def test_answers_are_in_the_order_of_questions_and_late_ones_are_replaced() -> None:
    end = threading.Event()
    assert within(0.2, [lambda: "a", lambda: str(end.wait(20)), lambda: "c"], "late") == ["a", "late", "c"]
    end.set()
    assert within(1, [], "late") == []


@pytest.mark.usefixtures("no_name_server")
def test_without_a_name_server_nothing_waits() -> None:
    assert took(lambda: clocks._addresses(["a", "b"], 0.2)) < 5
    assert took(lambda: peers.records(GPT.shadow_nodes, None)) < 5
    finding, *_ = peers.records(GPT.shadow_nodes, None)
    assert (finding.outcome, "no answer within 3 s" in finding.detail) == (Outcome.WARNING, True)
    assert took(lambda: reading.is_here("a")) < 5
    assert took(lambda: peers.switches(with_switch_at("tor.invalid:9559"))) < 5


def test_a_switch_that_accepts_and_answers_nothing_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("finsy")
    monkeypatch.setattr(peers, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        start = time.monotonic()
        (finding,) = peers.switches(with_switch_at(address))
        assert time.monotonic() - start < 4
    assert finding.outcome is Outcome.FAILED
    assert f"cannot be reached at {address} (no answer" in finding.detail


def test_a_switch_answers_although_its_counters_are_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A large fabric's counters take longer to decode than a switch may take to answer."""
    pytest.importorskip("finsy")
    from controlplane import status  # noqa: PLC0415 - an extra
    from tests.support.switch_process import job_on, softswitch  # noqa: PLC0415 - needs it

    async def late(*_: object) -> tuple[()]:
        await asyncio.sleep(20)
        return ()

    monkeypatch.setattr(status, "read_refusals", late)
    monkeypatch.setattr(peers, "_COUNTERS_SECONDS", 0.3)
    with softswitch("--no-p4") as switch:
        file = job_on(switch, tmp_path)
        assert subprocess.run([*COMMAND, "run", "--once", file], check=False).returncode == 0
        answers, counters = peers.switches(read_job(file))
    assert (answers.outcome, counters.outcome) == (Outcome.OK, Outcome.SKIPPED)
    assert "the guard's counters took longer than 0.3 s" in counters.detail
