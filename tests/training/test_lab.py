"""Training in labs with real switches and shadow nodes: killed, resumed and compared."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkmate.job.boundaries import first_shadow_ids
from checkmate.job.files import read_job
from checkmate.training.record.windows import SLICE_BYTES
from tests.support.labs.made import on_one_switch
from tests.support.training.lab import LabRun, TrainingLab, equal, training_lab
from tests.support.training.orders import ScriptOrders
from topologies.crew import checkmate, status
from topologies.describe.topology import LabError

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="the tagger needs clang"),
    pytest.mark.timeout(300),  # several starts of all ranks, on machines of any speed
]

TWO_RANKS = on_one_switch(2, (1, 1))
FIVE_IN_TREES = on_one_switch(5, (1, 2), channels=2, collective="tree")
TURNED = ("flat", "deep", "weight")
PIPELINE: dict[str, Any] = {
    "title": "two stages of two ranks on two switches, each with a shadow node of its own",
    "switches": ["tor0", "tor1"],
    "links": [["tor0", "tor1"]],
    "channels": 2,
    "dp_groups": [
        {"ranks": ["tor0", "tor0"], "shadow_nodes": [0]},
        {"ranks": ["tor1", "tor1"], "shadow_nodes": [1]},
    ],
    "shadow_nodes": [["tor0"], ["tor1", "tor1"]],
}


TWO_HOSTS: dict[str, Any] = {
    "title": "two hosts, each with a rank of two DP groups",
    "switches": ["tor"],
    "dp_groups": [{"hosts": [0, 1]}, {"hosts": [0, 1]}],
    "shadow_nodes": [["tor"], ["tor", "tor"]],
}


def same_training(run: LabRun, reference: LabRun) -> bool:
    """Return whether two runs had the same losses and final state on all ranks."""
    losses = [run.losses(rank) == reference.losses(rank) for rank in range(run.ranks)]
    return all(losses) and equal(run.states(), reference.states())


def without_buffers(state: dict[str, Any]) -> dict[str, Any]:
    """Drop buffers: all ranks get BatchNorm's statistics from the first one with the next forward."""
    model = {name: tensor for name, tensor in state["model"].items() if "running" not in name}
    return {**state, "model": model}


def check_restored(resumed: LabRun, reference: LabRun) -> None:
    """Check that the restored state is that of the uninterrupted run after that iteration."""
    iteration = resumed.resumed() - 1
    restored, expected = resumed.states("restored."), reference.states(f"after{iteration}.")
    assert equal(restored[0], expected[0])
    for resumed_state, reference_state in zip(restored, expected, strict=True):
        assert equal(without_buffers(resumed_state), without_buffers(reference_state))


def kill_and_resume(lab: TrainingLab, folder: Path, kill_at: int, **more: Any) -> None:
    """Check that a run killed on all ranks and restarted ends like an uninterrupted run."""
    reference = lab.train(ScriptOrders(str(folder / "reference"), restore=False, keep_each=True, **more))
    lab.reset()
    killed = lab.train(
        ScriptOrders(str(folder / "killed"), restore=False, pause=0.1, **more), kill_at=kill_at
    )
    completed = max(killed.losses(0))
    resumed = lab.train(ScriptOrders(str(folder / "killed"), keep_each=True, **{**more, "seed": 99}))
    assert resumed.resumed() >= completed  # at most one completed iteration is repeated
    check_restored(resumed, reference)
    assert same_training(resumed, reference)


@pytest.mark.slow  # a quick one is in the fixed corpus of tests/chaos
@pytest.mark.parametrize("topology", [TWO_RANKS, "single_tor", FIVE_IN_TREES], ids=["two", "four", "trees"])
def test_all_ranks_are_killed(topology: str | dict[str, Any], tmp_path: Path) -> None:
    """Parameters in channels_last, channels_last_3d and transposed keep their memory formats."""
    with training_lab(topology) as lab:
        kill_and_resume(lab, tmp_path, 4, iterations=8, turned=TURNED)


@pytest.mark.slow
@pytest.mark.parametrize("nics", [1, 2])
def test_hosts_with_two_ranks_each_are_killed(tmp_path: Path, nics: int) -> None:
    """With one NIC a host, two DP groups tag between the same addresses; with two, each rank has its own."""
    with training_lab(TWO_HOSTS | {"hosts": [["tor"] * nics] * 2}) as lab:
        first_ids = first_shadow_ids(read_job(lab.lab.job_file))
        assert first_ids == ((0, 2) if nics == 1 else (0, 0))
        kill_and_resume(lab, tmp_path, 4, iterations=8)
        streams = [stream for switch in status(lab.crew) for stream in switch["streams"]]
        assert {(s["dp_group"], s["shadow_id"], s["shard"]) for s in streams} == {
            (group, first + shard, shard) for group, first in enumerate(first_ids) for shard in (0, 1)
        }
        assert all(stream["bytes"] > 0 for stream in streams)
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "local", "collective", "options"),
    [
        pytest.param(2, 2, "ring", {}, id="plain"),
        pytest.param(2, 2, "ring", {"accumulate": 2, "turned": TURNED}, id="accumulated"),
        pytest.param(2, 2, "ring", {"amp": True, "infinite": (2,), "autocast": True}, id="mixed precision"),
        pytest.param(3, 2, "ring", {}, id="three hosts"),
        pytest.param(3, 2, "tree", {}, id="three hosts in trees"),
        pytest.param(2, 4, "ring", {}, id="four ranks a host"),
    ],
)
def test_all_ranks_of_several_hosts_train_one_model(
    hosts: int, local: int, collective: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Each DP group has a share of the model; nodes compare their share of all parameters and state."""
    groups = [{"hosts": [*range(hosts)]}] * local
    changes = {"hosts": [["tor"]] * hosts, "dp_groups": groups, "collective": collective}
    trees = {"tree_bytes": 262144} if collective == "tree" else {}
    with training_lab(TWO_HOSTS | changes | trees) as lab:
        kill_and_resume(lab, tmp_path, 4, iterations=8, together=True, **options)
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()
        file = tmp_path / "checkpoint.pt"
        lab.consolidate("--format", "torch", "--out", file)
    document, state = torch.load(file, weights_only=True), LabRun(tmp_path / "killed", hosts * local).state(0)
    assert equal(document["model"], state["model"])
    assert equal(document["optimizer"], state["optimizer"])


@pytest.mark.slow
def test_all_ranks_are_killed_under_a_double_of_nccl(tmp_path: Path) -> None:
    """The plugin's segments are tagged, copied and assembled: nodes compare parameters bit for bit."""
    with training_lab(on_one_switch(3, (1, 2), channels=2)) as lab:
        lab.use_nccl()
        kill_and_resume(lab, tmp_path, 4, iterations=8, turned=TURNED, nccl="2.29", width=400)
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()
            assert "is lost" not in node.error_text()
        assert all("not tagged" not in rank.error_text() for rank in lab.ranks)


@pytest.mark.slow
def test_a_memory_format_that_has_changed_since_is_taken(tmp_path: Path) -> None:
    """Parameters and optimizer state get the nodes' values in the new format; nodes are seeded again."""
    with training_lab(TWO_RANKS) as lab:
        orders = ScriptOrders(
            str(tmp_path), iterations=4, turned=("flat", "weight"), batch_norm=False, keep_each=True
        )
        first = lab.train(orders)
        again = lab.train(replace(orders, iterations=7, turned=("deep",), seed=99))
        assert again.resumed() == 4
        assert equal(again.states("restored."), first.states("after3."))
        file = tmp_path / "checkpoint.pt"
        lab.consolidate("--format", "torch", "--out", file)
        assert equal(torch.load(file, weights_only=True)["model"], again.state(0)["model"])
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()


def optimizer(kind: str, implementation: str) -> dict[str, Any]:
    """Return an optimizer with foreach, fused or neither."""
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    rate = {"lr": 0.05, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01}
    return {"optimizer": kind, "options": {**rate, **flags}}


@dataclass(frozen=True)
class LabCase:
    """The sizes of ring and shadow, an optimizer, and further options of the training."""

    ranks: int
    channels: int
    nodes: int
    kind: str
    implementation: str
    more: dict[str, Any]
    collective: str = "ring"

    @property
    def topology(self) -> dict[str, Any]:
        nics = [1 + number % 2 for number in range(self.nodes)]
        return on_one_switch(self.ranks, nics, channels=self.channels, collective=self.collective)

    def __str__(self) -> str:
        sizes = f"{self.ranks}-{self.channels}-{self.nodes}"
        return f"{sizes}-{self.kind}-{self.implementation}-{self.collective}"


CASES = [
    LabCase(2, 2, 2, "Adam", "fused", {"accumulate": 2, "turned": TURNED}),
    LabCase(3, 2, 3, "Adam", "fused", {"accumulate": 2}),
    LabCase(2, 1, 1, "SGD", "foreach", {"amp": True, "infinite": (2,)}),
    LabCase(2, 2, 2, "AdamW", "neither", {"batch_norm": False}),
    LabCase(3, 1, 2, "SGD", "fused", {"clip": 0.0}),
    LabCase(3, 1, 1, "AdamW", "foreach", {"autocast": True}),
    LabCase(4, 2, 1, "Adam", "neither", {"amp": True, "accumulate": 2}),
    LabCase(4, 1, 3, "AdamW", "fused", {"dropout": 0.5}),
    LabCase(4, 2, 2, "SGD", "foreach", {"infinite": (3,), "amp": True, "autocast": True}),
    LabCase(7, 1, 3, "SGD", "neither", {}),
    LabCase(7, 2, 1, "AdamW", "fused", {"amp": True, "infinite": (0, 4)}),
    LabCase(7, 2, 2, "Adam", "foreach", {"batch_norm": False}),
    LabCase(5, 2, 2, "AdamW", "fused", {"accumulate": 2}, "tree"),
    LabCase(6, 1, 3, "SGD", "foreach", {"amp": True, "infinite": (2,)}, "tree"),
]


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str)
def test_shadow_nodes_have_what_trainers_have(case: LabCase, tmp_path: Path) -> None:
    """Nodes compare all parameters and optimizer state in turn; at the end, the test reads them."""
    options = {**optimizer(case.kind, case.implementation), **case.more}
    with training_lab(case.topology) as lab:
        run = lab.train(ScriptOrders(str(tmp_path), iterations=7, layers=2, width=40, **options))
        file = tmp_path / "checkpoint.pt"
        lab.consolidate("--format", "torch", "--out", file)
        for number in range(case.nodes):
            assert "differ" not in lab.shadows[number].error_text()
    document = torch.load(file, weights_only=True)
    trained = run.state(0)
    assert document["iteration"] == 6
    assert (
        sum(tensor.nbytes for tensor in trained["model"].values()) < SLICE_BYTES
    )  # so everything was compared several times
    for name in ("model", "scheduler", "scaler"):
        assert equal(document[name], trained[name]), name
    assert equal(document["optimizer"]["state"], trained["optimizer"]["state"])
    assert document["extra"] == {rank: run.state(rank)["sampler"] for rank in range(case.ranks)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"amp": True, "autocast": True, "infinite": (3, 9), "accumulate": 2},
        {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9, "foreach": False}, "batch_norm": False},
        {"optimizer": "Adam", "options": {"lr": 0.01, "fused": True}, "amp": True, "infinite": (4,)},
    ],
    ids=["mixed precision", "sgd", "fused adam with a scaler"],
)
def test_all_ranks_are_killed_with(options: dict[str, Any], tmp_path: Path) -> None:
    with training_lab(TWO_RANKS) as lab:
        kill_and_resume(lab, tmp_path, 5, iterations=12, **options)


@pytest.mark.slow
def test_all_ranks_are_killed_while_records_would_still_bring_frozen_parameters(tmp_path: Path) -> None:
    """A record carries four of the forty MB, but the nodes have all from the start."""
    with training_lab(TWO_RANKS) as lab:
        kill_and_resume(lab, tmp_path, 3, iterations=5, frozen_mb=40)


@pytest.mark.slow
def test_a_finished_run_names_the_command_after_which_training_begins_again(tmp_path: Path) -> None:
    with training_lab(TWO_RANKS) as lab:
        first = lab.train(ScriptOrders(str(tmp_path / "first"), iterations=4))
        assert lab.train(ScriptOrders(str(tmp_path / "second"), iterations=4)).resumed() == 4
        error_text = lab.ranks[0].error_text()
        assert (
            "training had ended with iteration 3: `checkmate reset JOB` has the next start begin"
            in error_text
        )
        discarded = checkmate(lab.crew, "reset", lab.lab.job_file, "--yes")
        assert "iteration 3 and all before it are discarded. The next start of training begins" in discarded
        third = lab.train(ScriptOrders(str(tmp_path / "third"), iterations=4))
        assert "`checkmate reset` has discarded what was trained" in lab.ranks[0].error_text()
        assert same_training(third, first)
        assert lab.train(ScriptOrders(str(tmp_path / "third"), iterations=6)).resumed() == 4


@pytest.mark.slow
def test_stages_of_a_pipeline_resume_at_one_iteration(tmp_path: Path) -> None:
    with training_lab(PIPELINE) as lab:
        kill_and_resume(lab, tmp_path, 5, iterations=10)


SHARDED = {**PIPELINE, "title": "two shards of two replicas"}


def check_whole(document: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Check that a checkpoint has the rows of ranks 0 and 2, which are one replica of a sharded model."""
    names = [name for name in ranks[0]["model"] if "running" not in name and "num_batches" not in name]
    for name in names:
        assert equal(document["model"][name], torch.cat([ranks[rank]["model"][name] for rank in (0, 2)])), (
            name
        )
    states = [ranks[rank]["optimizer"]["state"] for rank in (0, 2)]
    assert document["optimizer"]["state"].keys() == states[0].keys()
    for number, entries in document["optimizer"]["state"].items():
        assert equal(entries["step"], states[0][number]["step"])
        for entry in ("exp_avg", "exp_avg_sq"):
            assert equal(entries[entry], torch.cat([shard_state[number][entry] for shard_state in states])), (
                number,
                entry,
            )
    if document["extra"] is not None:
        assert document["extra"] == {rank: state["sampler"] for rank, state in enumerate(ranks)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"autocast": True, "batch_norm": False},
        {"narrow": True, "batch_norm": False},
        {"nccl": "2.29", "width": 401},
    ],
    ids=["plain", "accumulated", "bf16 gradients", "bf16 parameters", "double of nccl"],
)
def test_a_sharded_model_resumes_with_all_its_shards(options: dict[str, Any], tmp_path: Path) -> None:
    """Replicas x shards of 2 x 2: layers with an odd number of rows, so that the second shard has fewer."""
    with training_lab(SHARDED) as lab:
        if "nccl" in options:
            lab.use_nccl()
        kill_and_resume(lab, tmp_path, 5, **{"iterations": 10, "sharded": True, "width": 33, **options})
        assert all("not tagged" not in rank.error_text() for rank in lab.ranks)
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()
        file = tmp_path / "checkpoint.pt"
        lab.consolidate("--format", "torch", "--out", file)
    check_whole(torch.load(file, weights_only=True), LabRun(tmp_path / "killed", 4).states())


def change_groups(lab: TrainingLab, groups: list[list[int]], nodes: list[list[int]]) -> None:
    """Give the lab's job these DP groups of the same ranks, with these shadow nodes."""
    data = yaml.safe_load(lab.lab.job_file.read_text())
    ranks = {rank["rank"]: rank for group in data["dp_groups"] for rank in group["ranks"]}
    data["dp_groups"] = [
        {"ranks": [ranks[number] for number in group], "shadow_nodes": ids}
        for group, ids in zip(groups, nodes, strict=True)
    ]
    lab.lab.job_file.write_text(yaml.safe_dump(data))


def restart_all(lab: TrainingLab) -> None:
    """Start shadow nodes and controller again, as after a change of the job file."""
    for member in list(lab.shadows.values()):
        lab.crew.restart(member)
    lab.controller.restart()
    lab.await_ready(list(lab.shadows.values()))


@pytest.mark.slow
def test_other_replicas_and_shards_go_on_from_a_checkpoint_on_disk(tmp_path: Path) -> None:
    """2 x 2, then DDP of all four ranks, then 2 x 2 again; each time the bits on disk."""
    shapes = {True: ([[0, 1], [2, 3]], [[0], [1]]), False: ([[0, 1, 2, 3]], [[0, 1]])}
    with training_lab(SHARDED) as lab:

        def train(sharded: bool, iterations: int, **more: Any) -> LabRun:
            folder = tmp_path / f"to{iterations}"
            orders = ScriptOrders(str(folder), iterations=iterations, sharded=sharded, width=33, **more)
            folder.mkdir(exist_ok=True)
            groups = tuple(map(tuple, shapes[sharded][0]))
            file = replace(orders, groups=groups, batch_norm=False, keep_each=True).write(folder / "orders")
            lab.start_script("tests.scripts.training", file)
            lab.crew.finish(lab.ranks, 100)
            return LabRun(folder, 4)

        run = train(True, 4)
        for sharded, iterations, kind in ((False, 7, "torch"), (True, 9, "dcp")):
            file = tmp_path / f"before{iterations}"
            lab.consolidate("--format", kind, "--out", file)
            change_groups(lab, *shapes[sharded])
            with pytest.raises(LabError, match="To continue with other ranks, save the state with"):
                train(sharded, iterations, checkpoints=str(file), seed=98)
            lab.kill_ranks()
            restart_all(lab)
            before, run = run, train(sharded, iterations, checkpoints=str(file), seed=99)
            assert run.resumed() == iterations - 3 + sharded
            whole, parts = (before, run) if sharded else (run, before)
            states = whole.states("" if sharded else "restored.")[0]
            check_whole({**states, "extra": None}, parts.states("restored." if sharded else ""))
        assert train(True, 9).resumed() == 9
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()


@pytest.mark.slow
def test_a_model_split_by_tensor_parallelism_resumes_with_all_its_parts(tmp_path: Path) -> None:
    """Replicas x shards x tensor parallelism of 2 x 1 x 2: layers with an odd number of rows and columns."""
    with training_lab({**PIPELINE, "title": "two tensor-parallel ranks of two replicas"}) as lab:
        more = {"sharded": True, "tensor": True, "width": 33, "batch_norm": False, "accumulate": 2}
        kill_and_resume(lab, tmp_path, 5, iterations=10, **more)
        for node in lab.shadows.values():
            assert "differ" not in node.error_text()
        file = tmp_path / "checkpoint.pt"
        lab.consolidate("--format", "torch", "--out", file)
    model = torch.load(file, weights_only=True)["model"]
    upper, lower = (LabRun(tmp_path / "killed", 4).state(rank)["model"] for rank in (0, 2))
    for name in upper:
        together = torch.cat([upper[name], lower[name]], dim=1 if name == "head.weight" else 0)
        assert equal(model[name], upper[name] if name in ("head.bias", "unused") else together), name


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three starts of twelve ranks
def test_the_papers_testbed_resumes_and_is_consolidated_at_one_iteration(tmp_path: Path) -> None:
    """2 PP x 6 DP, four shadow nodes."""
    with training_lab("paper_testbed") as lab:
        kill_and_resume(lab, tmp_path, 3, iterations=6)
        file = tmp_path / "checkpoint.pt"
        lab.consolidate("--format", "torch", "--out", file)
    document = torch.load(file, weights_only=True)
    assert {name: group["iteration"] for name, group in document.items()} == {"group0": 5, "group1": 5}
    states = LabRun(tmp_path / "killed", 12).states()
    for stage in range(2):
        assert equal(document[f"group{stage}"]["model"], states[6 * stage]["model"])


@pytest.mark.slow
def test_a_shadow_node_that_comes_back_is_current_again(tmp_path: Path) -> None:
    with training_lab(TWO_RANKS) as lab:
        run = lab.start(ScriptOrders(str(tmp_path / "run"), open_end=True, pause=0.1))
        lab.await_iteration(run, 5)
        lab.crew.kill(lab.shadows[1])
        lab.await_iteration(run, 15)
        lab.crew.restart(lab.shadows[1])
        lab.await_live(1)
        end = lab.end(run)
        again = lab.train(ScriptOrders(str(tmp_path / "again"), only_restore=True, seed=99))
        assert again.resumed() == end
        assert equal(again.state(0), run.state(0))


@pytest.mark.slow
def test_training_goes_on_without_any_shadow_node(tmp_path: Path) -> None:
    with training_lab(TWO_RANKS, shadow_nodes=False) as lab:
        run = lab.start(ScriptOrders(str(tmp_path / "run"), restore=False, open_end=True, pause=0.1, wait=1))
        lab.await_iteration(run, 5)
        assert "training begins without all shadow nodes" in lab.ranks[0].error_text()
        lab.start_shadow_nodes()
        lab.await_live(0)
        lab.await_live(1)
        for node in lab.shadows.values():
            lab.crew.kill(node)
        lab.await_iteration(run, max(run.losses(0)) + 5)
        lab.end(run)
        assert lab.ranks[0].error_text().count("training continues") == 4  # each node, twice


@pytest.mark.slow
def test_when_every_shadow_node_was_lost_training_resumes_from_disk(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with training_lab(TWO_RANKS) as lab:
        reference = lab.train(ScriptOrders(str(tmp_path / "reference"), iterations=12))
        lab.reset()
        lab.train(ScriptOrders(str(tmp_path / "run"), iterations=6, restore=False))
        lab.consolidate("--out", checkpoints / "iteration-00000005")
        for member in list(lab.shadows.values()):
            lab.crew.restart(member)
        lab.await_ready(list(lab.shadows.values()))
        orders = ScriptOrders(str(tmp_path / "run"), iterations=12, seed=99, checkpoints=str(checkpoints))
        resumed = lab.train(orders)
        assert resumed.resumed() == 6
        assert same_training(resumed, reference)
        again = lab.train(ScriptOrders(str(tmp_path / "again"), only_restore=True, seed=98))
        assert again.resumed() == 12
        assert equal(again.state(0), reference.state(0))
