"""Checkpoints on disk: read back as they were, by plain PyTorch too; whole or not there, whatever fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkmate import state
from checkmate.consolidate import disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.consolidate.snapshot import GroupState, Snapshot
from checkmate.optim.supported import options_of, spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wire.layout import Parameter, make_layout
from testbed.jobs import job
from tests.support.waiting import wait_until

FORMATS: tuple[disk.Format, ...] = ("dcp", "torch")


class DiskModel(nn.Module):
    """Tied weights, BatchNorm, a frozen parameter, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        found: torch.Tensor = self.head(self.norm(self.embedding(x)).relu()) * self.scale
        return found


class DiskRun:
    """A model, its optimizer and schedule; trained a few steps."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = DiskModel()
        groups: list[dict[str, Any]] = [
            {"params": [self.model.embedding.weight, self.model.scale]},
            {"params": list(self.model.norm.parameters()), "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.iteration = -1
        self.train(3)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.iteration += 1
            torch.manual_seed(self.iteration)
            self.model(torch.randn(4, 8)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def snapshot(self, groups: int = 1) -> Snapshot:
        """As the shadow nodes give it."""
        names = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        known = [Parameter(n, tuple(p.shape), "float32") for n, p in names.items()]
        beside = {"scale": self.model.scale, **dict(self.model.named_buffers())}
        record = pb.IterationRecord(
            iteration=self.iteration,
            buffers={name: state.dumps(tensor.detach()) for name, tensor in beside.items()},
        )
        for position in range(3):
            rng = {"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}
            record.parts.add(
                position=position,
                rng=state.dump_generators(rng),
                extra=state.dumps({"at": position, 5: [], "none": {}}),
            )
        step = record.parts[0].step
        step.scheduler = state.dumps(self.scheduler.state_dict())
        step.next_options.extend(options_of(group) for group in self.optimizer.param_groups)
        ids = {id(t): n for n, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        group = GroupState(
            make_layout(known, 2),
            spec_of(self.optimizer, {p: i for i, p in enumerate(names.values())}),
            record,
            {key: ids[id(tensor)] for key, tensor in self.model.state_dict(keep_vars=True).items()},
            {i: (p.detach(), dict(self.optimizer.state[p])) for i, p in enumerate(names.values())},
        )
        return Snapshot(job(groups=groups, nodes=2), "run", self.iteration, (group,) * groups)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_read_back(kind: disk.Format, groups: int, tmp_path: Path) -> None:
    snapshot = DiskRun().snapshot(groups)
    made = checkpoint(snapshot)
    path = tmp_path / "new" / "checkpoint.pt"
    disk.save(checkpoint(snapshot, by_name=kind == "dcp"), path, kind)
    found = disk.load(path)
    assert equal(sorted(found), sorted(made))
    for index in range(groups):
        ours, theirs = disk.group_of(made, index), disk.group_of(found, index)
        assert {key: equal(theirs[key], ours[key]) for key in ours} == dict.fromkeys(ours, True)
    assert (ours["iteration"], ours["job"], ours["group"]) == (2, "demo", groups - 1)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert disk.run_of(path) == "run"


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


@pytest.mark.parametrize("kind", FORMATS)
def test_plain_pytorch_resumes_without_this_project(kind: disk.Format, tmp_path: Path) -> None:
    """With the project out of reach, strictly by `load_state_dict`, to the bits of an uninterrupted run."""
    run = DiskRun()
    path = tmp_path / "checkpoint"
    disk.save(checkpoint(run.snapshot(), by_name=kind == "dcp"), path, kind)
    source = Path(__file__).read_text()
    model = source[source.index("class DiskModel") : source.index("class DiskRun")]
    class_run = source[source.index("class DiskRun") : source.index("    def snapshot")]
    (tmp_path / "plain.py").write_text(PLAIN.format(model=model, run=class_run))
    argv = [sys.executable, "-I", str(tmp_path / "plain.py"), kind, str(path)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
    model_state, found = get_state_dict(fresh.model, fresh.optimizer)
    optimizer_state: Any = found["state"]
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder):
        yield folder


@contextmanager
def mounted(place: Path, *what: str) -> Iterator[None]:
    """A disk of 1 MB, or something else, at a place that can be neither removed nor renamed meanwhile."""
    options = what or ("-t", "tmpfs", "-o", "size=1m", "checkmate-test")
    subprocess.run(["mount", *options, str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def made(kilobytes: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((kilobytes, 256), 1.0)},
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "group": 0,
        "iteration": 0,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_leaves_the_old_ones_whole(kind: disk.Format, small_disk: Path) -> None:
    old = small_disk / "one.pt"
    disk.save(made(300), old, kind)
    before = sorted(path.name for path in small_disk.rglob("*"))
    for path in (small_disk / "two.pt", old):
        with pytest.raises(disk.DiskError, match=f"can't write {path}: No space left on device"):
            disk.save(made(900), path, kind, replace=True)
    assert sorted(path.name for path in small_disk.rglob("*")) == before
    assert torch.equal(disk.load(old)["model"]["w"], torch.ones(300, 256))
    disk.save(made(400), small_disk / "two.pt", kind)
    assert torch.equal(disk.load(small_disk / "two.pt")["model"]["w"], torch.ones(400, 256))


KILLED = """
import sys
from pathlib import Path
import torch
from checkmate.consolidate import disk
print("ready", flush=True)
for i in range(10_000):
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


BLOCKED = """
import sys, time
from pathlib import Path
import torch
from checkmate.consolidate import disk

class Late:
    # Pickled only once it may be: until then the checkpoint is half written.
    def __reduce__(self):
        Path(sys.argv[3], "writing").touch()
        while not Path(sys.argv[3], "go").exists():
            time.sleep(0.01)
        return int, ()

found = {"model": {"w": torch.ones(1000)}, "late": Late(), "optimizer": {"state": {}, "param_groups": []}}
disk.save(found, Path(sys.argv[2]), sys.argv[1])
"""


@contextmanager
def half_way(path: Path, kind: disk.Format, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun to write a checkpoint, and goes on once `folder` has a file `go`."""
    with subprocess.Popen([sys.executable, "-c", BLOCKED, kind, str(path), str(folder)]) as process:
        try:
            wait_until((folder / "writing").exists, "half a checkpoint", 30)
            yield process
        finally:
            process.kill()
    (folder / "writing").unlink(missing_ok=True)


def hidden(folder: Path) -> list[Path]:
    return list(folder.glob(".unfinished-*"))


@pytest.mark.parametrize("kind", FORMATS)
def test_only_what_dead_writers_left_is_cleared(kind: disk.Format, tmp_path: Path) -> None:
    """A writer that lives, though it is slow, goes on."""
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
    """A writer died as it began, or as it ended, or while it removed; what else has something isn't ours."""
    (tmp_path / ".unfinished-begun").mkdir()
    (tmp_path / ".unfinished-other").mkdir()
    (tmp_path / ".unfinished-other" / "thesis.tex").touch()
    (tmp_path / ".removed-old").mkdir()
    (tmp_path / ".removed-old" / "__0_0.distcp").touch()
    disk.clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-other"]
    disk.clear_unfinished(tmp_path / "nothing")


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
    with pytest.raises(disk.DiskError, match="there is a folder already"):
        disk.save(made(1), tmp_path / "mine", "dcp")
    with pytest.raises(disk.DiskError, match="there is a folder already"):
        disk.save(made(1), tmp_path / "mine", "torch")
    with pytest.raises(disk.DiskError, match="there is a file already"):
        disk.save(made(1), tmp_path / "file", "dcp")
    with pytest.raises(disk.DiskError, match="can't write"):
        disk.save(made(1), tmp_path / "file" / "below", "torch")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"nonsense")
    torch.save({"weights": 1}, tmp_path / "b.pt")
    (tmp_path / "c").mkdir()
    for name in ("a.pt", "b.pt", "c", "d.pt"):
        assert disk.run_of(tmp_path / name) is None
        with pytest.raises(disk.DiskError, match=f"can't read .*{name} as a checkpoint"):
            disk.load(tmp_path / name)
