"""Checkpoints on disk: read back unchanged, by plain PyTorch too, and written atomically despite failures."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkmate import state
from checkmate.consolidate import disk
from checkmate.consolidate.assemble import checkpoint, plain
from tests.support.checkpoints import FORMATS, DiskModel, DiskRun, half_way, hidden, mounted, small_checkpoint


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and bool(first == second)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_read_back(kind: disk.Format, groups: int, tmp_path: Path) -> None:
    snapshot = DiskRun().snapshot(groups)
    original = checkpoint(snapshot)
    path = tmp_path / "new" / "checkpoint.pt"
    disk.save(checkpoint(snapshot, by_name=kind == "dcp"), path, kind)
    document = disk.load(path)
    assert equal(sorted(document), sorted(original))
    for index in range(groups):
        written_stage, read_stage = disk.stage_in(original, index), disk.stage_in(document, index)
        assert {key: equal(read_stage[key], written_stage[key]) for key in written_stage} == dict.fromkeys(
            written_stage, True
        )
    assert (written_stage["iteration"], written_stage["job"], written_stage["group"]) == (
        2,
        "demo",
        groups - 1,
    )
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert disk.read_run(path) == "run"


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_large_is_on_the_disk_twice_and_its_size_is_returned(
    kind: disk.Format, tmp_path: Path
) -> None:
    snapshot = DiskRun().snapshot(2)
    for group in snapshot.groups:
        group.record.parts[0].extra = state.dumps({"ema": torch.zeros(1_000_000)})
    path = tmp_path / "checkpoint"
    nbytes = disk.save(checkpoint(snapshot, by_name=kind == "dcp"), path, kind)
    assert nbytes == sum(file.stat().st_size for file in (path.iterdir() if kind == "dcp" else [path]))
    assert 8e6 < nbytes < 9e6
    document = disk.load(path)
    for index in range(2):
        extras = disk.stage_in(document, index)["extra"].values()
        assert [extra["ema"].numel() for extra in extras if "ema" in extra] == [1_000_000]


PLAIN = """
import importlib.util, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path[:] = [p for p in sys.path if "site-packages" in p or "lib" in p]
assert importlib.util.find_spec("checkmate") is None, "the project is still importable"
import torch
from typing import Any
from torch import nn
{model}
kind, path = sys.argv[1:]
if kind == "dcp":
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(path, path + ".pt")
    path += ".pt"
found = torch.load(path)
{run}
run = DiskRun()
run.model.load_state_dict(found["model"])
run.optimizer.load_state_dict(found["optimizer"])
run.scheduler.load_state_dict(found["scheduler"])
run.iteration = found["iteration"]
torch.set_rng_state(found["rng"]["2" if kind == "dcp" else 2]["torch"])
run.train(4)
torch.save([run.model.state_dict(), run.optimizer.state_dict()], path + ".out")
"""


def test_the_milestones_of_a_schedule_stay_what_they_are() -> None:
    """They are a Counter, which counts what it is made of unless that is a mapping."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 6])
    scheduler_state = plain(state.loads(state.dumps(scheduler.state_dict())))
    assert scheduler_state["milestones"] == Counter({3: 1, 6: 2})
    assert type(scheduler_state["milestones"]) is Counter
    assert type(plain(OrderedDict(a=np.float64(1)))) is OrderedDict


@pytest.mark.parametrize(
    "kind", [FORMATS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in FORMATS[1:])]
)
def test_plain_pytorch_resumes_without_this_project(kind: disk.Format, tmp_path: Path) -> None:
    """Without the project, by strict `load_state_dict`, with the bits of an uninterrupted run."""
    run = DiskRun()
    path = tmp_path / "checkpoint"
    disk.save(checkpoint(run.snapshot(), by_name=kind == "dcp"), path, kind)
    model = inspect.getsource(DiskModel)
    class_run, _, _ = inspect.getsource(DiskRun).partition("    def snapshot")
    (tmp_path / "plain.py").write_text(PLAIN.format(model=model, run=class_run))
    argv = [sys.executable, "-I", str(tmp_path / "plain.py"), kind, str(path)]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    out = path if kind == "torch" else path.with_suffix(".pt")
    model_state, optimizer_state = torch.load(f"{out}.out")
    run.train(4)
    assert equal(dict(model_state), dict(run.model.state_dict()))
    assert equal(optimizer_state, run.optimizer.state_dict())


def test_dcp_loads_in_place_as_pytorchs_own_tutorial_does(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    run, fresh = DiskRun(), DiskRun()
    disk.save(checkpoint(run.snapshot(), by_name=True), tmp_path / "c", "dcp")
    fresh.optimizer.param_groups[0]["params"].pop()  # these functions don't expect one without gradients
    model_state, optimizer_document = get_state_dict(fresh.model, fresh.optimizer)
    optimizer_state: Any = optimizer_document["state"]
    for value in (*model_state.values(), *optimizer_state["embedding.weight"].values()):
        value.zero_()
    load(
        {"model": model_state, "optimizer": {"state": optimizer_state}},
        checkpoint_id=str(tmp_path / "c"),
        no_dist=True,
    )
    fresh.model.load_state_dict(model_state)
    assert equal(dict(fresh.model.state_dict()), dict(run.model.state_dict()))
    for name, parameter in run.model.named_parameters():
        if name in optimizer_state:
            assert equal(dict(optimizer_state[name]), dict(run.optimizer.state[parameter]))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_leaves_the_old_ones_whole(kind: disk.Format, small_disk: Path) -> None:
    old = small_disk / "one.pt"
    disk.save(small_checkpoint(300), old, kind)
    before = sorted(path.name for path in small_disk.rglob("*"))
    for path in (small_disk / "two.pt", old):
        with pytest.raises(disk.DiskError, match=f"can't write {path}: No space left on device"):
            disk.save(small_checkpoint(900), path, kind, replace=True)
    assert sorted(path.name for path in small_disk.rglob("*")) == before
    assert torch.equal(disk.load(old)["model"]["w"], torch.ones(300, 256))
    disk.save(small_checkpoint(400), small_disk / "two.pt", kind)
    assert torch.equal(disk.load(small_disk / "two.pt")["model"]["w"], torch.ones(400, 256))


KILLED = """
import sys
from pathlib import Path
import torch
from checkmate import state
from checkmate.consolidate import disk
for i in range(10_000):
    if i == 1:
        print("ready", flush=True)  # the first one imports torch's writer
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    found = {"model": {"w": torch.full((1000, 1000), float(i))}, "optimizer": optimizer, "iteration": i}
    disk.save(found, Path(sys.argv[2]) / sys.argv[3], sys.argv[1], replace=True)
"""


@pytest.mark.parametrize("kind", ["dcp", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(kind: disk.Format, tmp_path: Path) -> None:
    name = "checkpoint.pt"
    for wait in (0.05, 0.11, 0.17):
        argv = [sys.executable, "-c", KILLED, kind, str(tmp_path), name]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.5 + wait)
            process.kill()
        assert disk.is_checkpoint(tmp_path / name)
        loaded = disk.load(tmp_path / name)
        assert (loaded["model"]["w"] == loaded["iteration"]).all()
    disk.clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_only_what_dead_writers_left_is_cleared(kind: disk.Format, tmp_path: Path) -> None:
    """A slow writer that is alive continues."""
    out, notes = tmp_path / "out", tmp_path / "notes"
    out.mkdir()
    notes.mkdir()
    for _ in range(2):
        with half_way(out / "first.pt", kind, notes) as process:
            process.kill()
    assert len(hidden(out)) == 2
    with half_way(out / "second.pt", kind, notes) as process:
        disk.clear_unfinished(out)
        assert len(hidden(out)) == 1
        (notes / "go").touch()
        assert process.wait(30) == 0
    assert disk.is_checkpoint(out / "second.pt")
    assert hidden(out) == []


def test_of_leftovers_without_a_lock_those_are_cleared_that_are_certain(tmp_path: Path) -> None:
    """A writer died at its beginning, at its end, or while it removed; other content isn't ours."""
    (tmp_path / ".unfinished-begun").mkdir()
    (tmp_path / ".unfinished-other").mkdir()
    (tmp_path / ".unfinished-other" / "thesis.tex").touch()
    (tmp_path / ".removed-old").mkdir()
    (tmp_path / ".removed-old" / "__0_0.distcp").touch()
    disk.clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-other"]
    disk.clear_unfinished(tmp_path / "nothing")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_cant_be_removed_is_named_and_the_rest_is_removed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with half_way(tmp_path / name, "torch", tmp_path) as process:
            process.kill()
    stuck = sorted(hidden(tmp_path))[1]
    with mounted(stuck):
        with pytest.raises(disk.DiskError, match=f"can't clear {stuck}: "):
            disk.clear_unfinished(tmp_path)
        assert hidden(tmp_path) == [stuck]


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(disk.DiskError, match="the folder exists already"):
        disk.save(small_checkpoint(1), tmp_path / "mine", "dcp")
    with pytest.raises(disk.DiskError, match="the folder exists already"):
        disk.save(small_checkpoint(1), tmp_path / "mine", "torch")
    with pytest.raises(disk.DiskError, match="a file of this name exists already"):
        disk.save(small_checkpoint(1), tmp_path / "file", "dcp")
    with pytest.raises(disk.DiskError, match="can't write"):
        disk.save(small_checkpoint(1), tmp_path / "file" / "below", "torch")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"nonsense")
    torch.save({"weights": 1}, tmp_path / "b.pt")
    (tmp_path / "c").mkdir()
    for name in ("a.pt", "b.pt", "c", "d.pt"):
        assert disk.read_run(tmp_path / name) is None
        with pytest.raises(disk.DiskError, match=f"can't read .*{name} as a checkpoint"):
            disk.load(tmp_path / name)
