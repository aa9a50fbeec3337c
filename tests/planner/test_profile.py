"""A machine as a shadow node: real sockets and steps of a small model, and the derived sizes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.base import machine_memory
from checkmate.planner.models.named import Model, layers_of, load_model
from checkmate.planner.profile import machine, receive
from checkmate.planner.profile import step as profile_step
from checkmate.planner.profile.figure import write_figure
from checkmate.planner.profile.sizing import Machine, sizing
from checkmate.planner.profile.step import TooLittleMemory, required_bytes, samples_of
from checkmate.planner.scaling import (
    StepTimes,
    dtype_of,
)
from testbed.jobs import job_data
from tests.support.cli import COMMAND, invoke
from tests.support.documents import check_document
from tests.support.planner import ADAMW, TINY, model_by_name, times


def test_a_model_that_fits_is_stepped_whole() -> None:
    model = load_model(TINY)
    (sample,) = samples_of(model, ADAMW, required_bytes(model.parameters, ADAMW))
    assert (sample.parameters, sample.weight) == (model.parameters, 1.0)


@settings(max_examples=40)
@given(st.sampled_from(["ResNet50", "GPT3-XL", "LLaMA2-7B"]), st.integers(1 << 20, 20 << 30))
def test_layers_stand_for_all_of_their_kind_and_fit(name: str, memory: int) -> None:
    model = model_by_name(name)
    samples = samples_of(model, ADAMW, memory)
    stepped = sum(sample.weight * sum(p.elements for p in sample.parameters) for sample in samples)
    assert stepped == pytest.approx(model.elements)
    for sample in samples:
        assert required_bytes(sample.parameters, ADAMW) <= memory
        assert sample.weight >= 1
    kinds = {tuple((p.shape, p.dtype) for p in layer) for layer in layers_of(model.parameters)}
    assert len(samples) in (1, len(kinds))


def test_too_little_memory_is_said() -> None:
    with pytest.raises(TooLittleMemory, match="^1 byte of memory: too little to step"):
        samples_of(load_model("ResNet50"), ADAMW, 1)


@pytest.mark.parametrize("nics", receive.NICS)
def test_receiving_is_measured_with_real_sockets(nics: int) -> None:
    before = children()
    rates = list(receive.measure(nics, 0.2))
    assert len(rates) >= 1
    assert rates[-1] > 1e6
    assert not children() - before


def test_receiving_that_is_broken_off_leaves_nothing() -> None:
    before, threads, files = children(), set(threading.enumerate()), open_files()
    rates = receive.measure(2, 60)
    next(rates)
    rates.close()
    # What other tests have left may end meanwhile.
    assert not children() - before
    assert not set(threading.enumerate()) - threads
    assert not open_files() - files


def open_files() -> Counter[str]:
    """Count what is open here by name, which is the inode of a socket or a pipe."""
    folder = Path("/proc/self/fd")
    return Counter(
        os.readlink(folder / name) for name in os.listdir(folder) if os.path.lexists(folder / name)
    )


def children() -> set[int]:
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in pids.split()}


@pytest.mark.parametrize("memory", [1 << 30, 30_000])
def test_a_step_is_measured_whole_and_by_layer(memory: int) -> None:
    model = load_model(TINY)
    threads = torch.get_num_threads()
    progress: list[tuple[str, float]] = []
    times_measured = profile_step.measure(
        model, ADAMW, (1, 2), 0.01, memory, lambda text, part: progress.append((text, part))
    )
    assert list(times_measured.seconds) == [1, 2]
    assert min(times_measured.seconds.values()) > 0
    assert times_measured.by_layer == (memory == 30_000)
    assert sum(part for _, part in progress) == pytest.approx(2)
    assert torch.get_num_threads() == threads
    assert times_measured.elements == model.elements


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_figure_names_axes_models_and_nodes(tmp_path: Path, name: str) -> None:
    model = load_model(TINY)
    lines = [
        (model, times({1: 4.0, 2: 2.2})),
        (Model("other", model.parameters), StepTimes("o", "AdamW", "float32", 1, {1: 4.1}, True)),
    ]
    file = tmp_path / name
    enough = sizing(model, ADAMW, lines[0][1], Machine(2, 1 << 40, 1e9), 3, 1.5)
    write_figure(file, lines, 2, 3, 1.5, {TINY: enough})
    content = file.read_bytes()
    write_figure(file, lines, 2, 3, 1.5, {TINY: enough})
    assert file.read_bytes() == content
    assert [f.name for f in tmp_path.iterdir()] == [name]
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    for words in ("cores, over all shadow nodes", "time of an optimizer step", TINY, "other (by layer)"):
        assert words in text
    assert all(
        words in text for words in ("1 node", "2 nodes", "3 nodes", "iteration, 1.5 s", "measured here")
    )


RING = ("--channels", "3", "--receive-buffer", "8")


def profile(*options: str) -> tuple[int, str]:
    return invoke("profile", "--model", TINY, "--seconds", "0.1", "--threads", "1", *options)


def test_the_command_measures_and_plan_reads_it(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    code, output = profile("--json", "--iteration-time", "10s", "--plot", str(picture), "--cores", "4", *RING)
    assert code == 0
    text = output[output.index("{\n") :]
    check_document("profile", document := json.loads(text))
    assert [step["model"] for step in document["steps"]] == [TINY]
    assert document["sizes"][0]["nodes_needed"] == 1
    assert [size["cores"] for size in document["sizes"][0]["nodes"]] == [4, 8, 12, 16]
    assert set(document["receive_bytes_per_s"]) == {"1", "2"}
    assert all(
        outlier["what"].startswith("receiving") for outlier in document["outliers"]
    )  # one thread has no other
    assert {size["socket_bytes"] for size in document["sizes"][0]["nodes"]} == {2 * 3 * 2 * (8 << 20)}
    assert picture.read_text().startswith("<?xml")

    profile_file = tmp_path / "profile.json"
    profile_file.write_text(text)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data(nodes=2, channels=2)))
    line: list[str | Path] = [
        "plan",
        file,
        "--capacity",
        "--model",
        TINY,
        "--profile",
        profile_file,
        "--iteration-time",
        "10s",
    ]
    code, output = invoke(*line, "--node-memory", "4GB", "--json")
    assert code == 0, output
    check_document("plan-capacity", plan := json.loads(output[output.index("{\n") :]))
    assert plan["not_checked"] == []
    step = document["steps"][0]["seconds"]["1"]
    assert [node["step_seconds"] for node in plan["nodes"]] == pytest.approx([step / 2] * 2)
    rate = min(document["receive_bytes_per_s"]["2"] / 2, 100e9 / 8)
    assert plan["nics"][0]["receive_seconds"] == pytest.approx(plan["nics"][0]["bytes"] / rate)
    code, output = invoke(*line, "--node-memory", "4GB", "--iteration-time", "1us")
    assert code == 2
    assert "for the optimizer step of an iteration of 1e-06 s" in " ".join(output.split())


def test_the_command_says_what_is_enough() -> None:
    code, output = profile("--iteration-time", "10s")
    assert code == 0
    assert f"{TINY}: 1 shadow node needed" in " ".join(output.split())
    code, output = profile("--iteration-time", "1us", "--memory", "0.06MB")
    assert code == 0
    assert "by layer" in output
    assert "not even 16 nodes" in " ".join(output.split())


def test_the_plot_has_the_number_of_nodes_that_the_table_names(tmp_path: Path) -> None:
    """More nodes are needed than are shown at least, because each has little memory."""
    picture = tmp_path / "scaling.svg"
    line = ("--json", "--iteration-time", "10s", "--receive-buffer", "1", "--node-memory", "4.34MB")
    code, output = profile(*line, "--nodes", "2", "--plot", str(picture))
    assert code == 0
    nodes_needed = json.loads(output[output.index("{\n") :])["sizes"][0]["nodes_needed"]
    assert 4 < nodes_needed <= 8
    svg = picture.read_text()
    assert f"<!-- {nodes_needed} nodes -->" in svg and f"<!-- {nodes_needed + 1} nodes -->" not in svg
    assert "<!-- nodes that suffice -->" in svg


def test_a_busy_machine_is_told_by_its_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "load_average", lambda: 35.4)
    _, output = profile("--seconds", "0.1")
    assert "busy: the load average is 35.4 on 2 cores, which is" in " ".join(output.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--threads", "0"], "--threads must be numbers from 1 to"),
        (["--threads", "1,x"], "--threads must be numbers from 1 to"),
        (["--threads", "4096"], "this machine's cores"),
        (["--plot", "x.pdf"], "--plot: x.pdf must end in .png or .svg"),
        (["--plot", "/nowhere/x.png"], "/nowhere, which is not a folder"),
        (["--iteration-time", "soon"], "--iteration-time must be a time"),
        (["--memory", "0GB"], "--memory must be more than 0"),
        (["--model", "GPT9"], "no model GPT9"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(line: Sequence[str], words: str) -> None:
    code, output = invoke("profile", *line)
    assert code == 2
    assert words in " ".join(output.split())


def test_too_little_memory_is_said_before_anything_is_measured() -> None:
    start = time.monotonic()
    code, output = invoke("profile", "--model", "ResNet50", "--memory", "1B", "--seconds", "60")
    assert code == 1
    assert "1 byte of memory: too little to step even part of conv1.weight" in " ".join(output.split())
    assert time.monotonic() - start < 30


def test_this_machine_has_cores_and_memory() -> None:
    assert machine.cores() >= 1
    assert 0 < machine.memory_available() < machine_memory.total()
    assert math.isfinite(machine.load_average())
    assert dtype_of(load_model(TINY)) == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_profile_that_is_interrupted_leaves_nothing_behind(number: signal.Signals) -> None:
    line = [*COMMAND, "profile", "--model", TINY, "--seconds", "60"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children_file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (sender := children_file.read_text().split()):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in error
    assert out == ""
    assert not any(Path(f"/proc/{pid}/stat").exists() for pid in sender)


def test_a_rate_is_measured_until_something_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine had a rate of 0, by which the command divided."""

    class LateReceiver:
        def __init__(self, socks: object) -> None:
            self._reads = 0

        def settle(self) -> None:
            pass

        def close(self) -> None:
            pass

        @property
        def received(self) -> int:
            self._reads += 1
            return 1000 if self._reads > 8 else 0

    monkeypatch.setattr(receive, "Receiver", LateReceiver)
    monkeypatch.setattr(receive, "connections", nullcontext)
    monkeypatch.setattr(receive, "_TICK_SECONDS", 0.001)
    rates = list(receive.measure(1, 0.001))
    assert rates[0] == 0
    assert rates[-1] > 0
