"""Models by name and by function: published sizes, the libraries' order, and training's layout."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from checkmate.planner.models.named import NAMED_MODELS, Model, ModelError, layers_of, load_model, stages_of
from checkmate.training.model.ddp import DdpModel
from checkmate.training.start.places import lay_out
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import ITEMSIZES, Parameter

DIGESTS = {
    "ResNet50": "e49e1f349708ac17",
    "ResNet152": "14c71c6a778fbddb",
    "ViT-H-14": "feb9d80065032be8",
    "GPT2-1.5B": "99953efce13bef70",
    "GPT3-XL": "05589d598242829e",
    "GPT3-6.7B": "289647fcdbdc1964",
    "LLaMA2-7B": "1c6d2b4bca13e324",
    "LLaMA2-13B": "f24773949d6ad28f",
    "LLaMA3-8B": "e966b8fbe8737229",
}
"""Digests of names and shapes in registration order, from torchvision 0.28 and transformers 5.23."""
PAPER = {
    "ResNet50": 25.6e6,
    "ResNet152": 60.2e6,
    "ViT-H-14": 633.5e6,
    "GPT2-1.5B": 1.5e9,
    "GPT3-XL": 1.3e9,
    "GPT3-6.7B": 6.7e9,
    "LLaMA2-7B": 7e9,
    "LLaMA2-13B": 13e9,
    "LLaMA3-8B": 8e9,
}
"""The paper's table of models."""


@pytest.mark.parametrize("named_model", NAMED_MODELS, ids=lambda named_model: named_model.name)
def test_a_named_model_has_the_published_parameters(named_model: object) -> None:
    model = load_model(getattr(named_model, "name", ""))
    assert model.elements == getattr(named_model, "parameters", 0)
    assert model.elements == pytest.approx(PAPER[model.name], rel=0.04)  # 1.56 is printed as 1.5, 6.74 as 7
    text = "\n".join(f"{p.name} {p.shape}" for p in model.parameters)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[model.name]


def test_vision_is_fp32_and_language_bf16_unless_told() -> None:
    assert {p.dtype for p in load_model("ResNet50").parameters} == {"float32"}
    assert {p.dtype for p in load_model("gpt3-xl").parameters} == {"bfloat16"}
    assert load_model("gpt3-xl", "float32").nbytes == 2 * load_model("GPT3-XL").nbytes


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny() -> nn.Module:
    """For `module:function`: shared, frozen and small parameters."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 50, bias=False))
    model[3].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("shards", [1, 3])
def test_the_layout_is_the_one_that_training_makes(shards: int) -> None:
    trained = lay_out(DdpModel(DistributedDataParallel(tiny())), shards)
    planned = make_layout(load_model("tests.planner.test_models:tiny").parameters, shards)
    assert planned.fingerprint == trained.fingerprint
    assert planned.buckets == trained.buckets


def not_a_model() -> int:
    return 1


def breaks() -> nn.Module:
    raise RuntimeError("needs [a] GPU")


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def leaves() -> nn.Module:
    sys.exit(3)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4))


def doubled() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GPT5", "no model GPT5; use ResNet50, .* or module:function"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("tests.planner.test_models:nothing", "has no attribute 'nothing'"),
        ("tests.planner.test_models:not_a_model", r"returned a int, not an nn\.Module"),
        ("tests.planner.test_models:DIGESTS", "is not a function"),
        ("tests.planner.test_models:breaks", r"breaks\(\) failed: RuntimeError: needs \[a\] GPU"),
        ("tests.planner.test_models:frozen", "no parameter that needs a gradient"),
        ("tests.planner.test_models:doubled", "weight has type complex64; add --dtype"),
        ("tests.planner.test_models:leaves", r"leaves\(\) failed: SystemExit: 3"),
        ("tests.planner.test_models:lazy", r"1\.weight has no shape before the first batch"),
        (":", "Empty module name"),
    ],
)
def test_what_is_no_model_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(name)


def test_a_module_of_the_folder_at_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_only_here.py").write_text("import torch\ndef net(): return torch.nn.Linear(3, 5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert load_model("mine_only_here:net").elements == 20


def test_a_module_that_ends_the_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_the_program.py").write_text("import sys\nsys.exit('no GPU')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(ModelError, match="importing ends_the_program failed: SystemExit: no GPU"):
        load_model("ends_the_program:net")


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ModelError, match="no type float8 .*float64, float32, bfloat16, float16"):
        load_model("ResNet50", "float8")


def test_blocks_are_layers() -> None:
    layers = layers_of(load_model("LLaMA2-7B").parameters)
    assert len(layers) == 32 + 3  # embedding, norm, head
    assert sorted({len(layer) for layer in layers}) == [1, 9]
    resnet = layers_of(load_model("ResNet50").parameters)
    assert len(resnet) == 16 + 3  # conv1, bn1, fc


NAMES = st.lists(
    st.tuples(
        st.sampled_from(["a", "layers.0", "layers.1", "layers.2.mlp", "enc.block_3"]), st.integers(1, 9)
    ),
    min_size=1,
    max_size=20,
)


@given(NAMES, st.integers(1, 4))
def test_stages_are_whole_layers_in_order(sizes: list[tuple[str, int]], stages: int) -> None:
    parameters = [Parameter(f"{m}.w{i}", (n,), "float32") for i, (m, n) in enumerate(sorted(sizes))]
    model = Model("x", tuple(parameters))
    try:
        stage_models = stages_of(model, stages)
    except ModelError:
        assert stages > 1
        return
    assert [p for stage in stage_models for p in stage.parameters] == parameters
    for layer in layers_of(parameters):
        assert sum(bool(set(layer) & set(stage.parameters)) for stage in stage_models) == 1


def test_the_papers_two_stages_are_balanced() -> None:
    for name in ("LLaMA2-7B", "LLaMA2-13B", "LLaMA3-8B"):
        model = load_model(name)
        first, last = stages_of(model, 2)
        assert first.nbytes + last.nbytes == model.nbytes
        assert first.nbytes == pytest.approx(last.nbytes, rel=0.02)


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(ModelError, match="19 layers, which cannot be balanced over 64 DP groups"):
        stages_of(load_model("ResNet50"), 64)


def test_types_are_those_of_gradients() -> None:
    assert all(named_model.dtype in ITEMSIZES for named_model in NAMED_MODELS)
