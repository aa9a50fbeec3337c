"""The step kernel beside PyTorch's own steps on this machine's CPU, and where it does not step."""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkmate.optim import kernel as kernel_module
from checkmate.optim.kernel import (
    RECORDED,
    StepKernel,
    described_device,
    fits_kernel,
    is_recorded,
    powers_of,
    trouble,
)
from checkmate.optim.supported import spec_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.replica import Replica
from checkmate.state import DTYPES
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from tests.optim.test_vectors import differences, recorded_variants, vectors
from tools.step_vectors import SIZES, Variant, as_bits, give_gradients, make

needs_kernel = pytest.mark.skipif(bool(trouble()), reason=trouble())

OPTIONS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.1, "betas": (0.3, 0.9)}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
]


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    """Forget what was compiled and compared, before and after."""
    for cached in (kernel_module._library, kernel_module._repeats):
        cached.cache_clear()
    yield
    for cached in (kernel_module._library, kernel_module._repeats):
        cached.cache_clear()


def optimizers(kind: type[torch.optim.Optimizer], options: dict[str, Any], *sizes: int) -> list[Any]:
    """Return two optimizers with equal parameters of these sizes."""
    torch.manual_seed(1)
    parameters = [torch.randn(size) * 0.01 for size in sizes]
    return [kind([parameter.clone() for parameter in parameters], **options) for _ in range(2)]


def give(both: list[Any]) -> None:
    """Give the parameters of both the same new gradients."""
    for pair in zip(*(optimizer.param_groups[0]["params"] for optimizer in both), strict=True):
        gradient = torch.randn_like(pair[0])
        for parameter in pair:
            parameter.grad = gradient.clone()


def assert_equal(both: list[Any]) -> None:
    for mine, other in zip(*(optimizer.param_groups[0]["params"] for optimizer in both), strict=True):
        states = [both[0].state[mine], both[1].state[other]]
        assert states[0].keys() == states[1].keys()
        for pair in ((mine, other), *((states[0][name], states[1][name]) for name in states[0])):
            assert pair[0].dtype == pair[1].dtype
            assert torch.equal(pair[0].view(torch.int32), pair[1].view(torch.int32))


@needs_kernel
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_steps_of_several_threads_have_the_bits_of_pytorch(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], foreach: bool
) -> None:
    both = optimizers(kind, {**options, "foreach": foreach}, 300_001, 3, 100_000, 0)
    kernel = StepKernel("cpu")
    assert kernel.covers(kind, both[1].param_groups[0], torch.float32)
    threads = torch.get_num_threads()
    for count in (1, 3, 4):
        give(both)
        torch.set_num_threads(count)
        try:
            both[0].step()
            kernel.step(both[1], both[1].param_groups[0]["params"])
        finally:
            torch.set_num_threads(threads)
        assert_equal(both)


@needs_kernel
def test_factors_round_the_gradient_one_after_another() -> None:
    both = optimizers(torch.optim.AdamW, {}, 1000)
    give(both)
    both[0].param_groups[0]["params"][0].grad.mul_(0.3).mul_(0.7)
    both[0].step()
    StepKernel("cpu").step(both[1], both[1].param_groups[0]["params"], [[0.3, 0.7]])
    assert_equal(both)


@needs_kernel
@pytest.mark.skipif(kernel_module._mkl()[0] is None, reason="PyTorch takes square roots without MKL here")
def test_other_bits_than_pytorch_s_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = optimizers(torch.optim.Adam, {}, 3)[0].param_groups[0]
    assert StepKernel("cpu").covers(torch.optim.Adam, options, torch.float32)
    kernel_module._repeats.cache_clear()
    monkeypatch.setattr(kernel_module, "_mkl", lambda: (None, None))
    with caplog.at_level("INFO", "checkmate"):
        assert not StepKernel("cpu").covers(torch.optim.Adam, options, torch.float32)
    assert "Adam is stepped by PyTorch itself: here the step kernel has other bits" in caplog.text


def test_without_a_compiler_steps_are_pytorch_s_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    options = optimizers(torch.optim.Adam, {}, 3)[0].param_groups[0]
    with caplog.at_level("INFO", "checkmate"):
        for _ in range(2):
            assert not StepKernel("cpu").covers(torch.optim.Adam, options, torch.float32)
            assert not StepKernel("gpu").covers(torch.optim.Adam, options, torch.float32)
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer steps are PyTorch's own: the step kernel needs a C compiler: apt-get install gcc libc6-dev"
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.NAdam, {}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
        (torch.optim.Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}),
    ],
)
def test_other_steps_are_not_covered(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    group = optimizers(kind, {"foreach": False, **options} if "fused" not in options else options, 3)[0]
    assert not StepKernel("cpu").covers(kind, group.param_groups[0], torch.float32)


@needs_kernel
def test_a_learning_rate_may_be_numpy_s_double_and_betas_may_not() -> None:
    """A schedule may compute with NumPy, which has powers of its own."""
    kernel, kind = StepKernel("cpu"), torch.optim.AdamW
    options = optimizers(kind, {"foreach": False, "lr": np.float64(0.1)}, 3)[0].param_groups[0]
    assert kernel.covers(kind, options, torch.float32)
    assert not kernel.covers(kind, {**options, "betas": (np.float64(0.9), 0.99)}, torch.float32)


@needs_kernel
def test_state_of_another_type_or_layout_is_not_the_kernel_s() -> None:
    both = optimizers(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 100)
    (parameter,) = both[1].param_groups[0]["params"]
    assert fits_kernel(both[1], parameter), "it has no state yet"
    for buffer in (torch.zeros(100, dtype=torch.bfloat16), torch.zeros(99), torch.zeros(200)[::2], 0.5):
        both[1].state[parameter]["momentum_buffer"] = buffer
        assert not fits_kernel(both[1], parameter)
    adam = optimizers(torch.optim.Adam, {}, 100)[1]
    (parameter,) = adam.param_groups[0]["params"]
    adam.state[parameter].update(
        step=torch.tensor(1.0), exp_avg=torch.zeros(100), exp_avg_sq=torch.zeros(100)
    )
    assert fits_kernel(adam, parameter)
    adam.param_groups[0]["amsgrad"] = True
    assert not fits_kernel(adam, parameter), "PyTorch misses that state, too"


@needs_kernel
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_comparison_has_types_of_its_own(default: torch.dtype) -> None:
    options = optimizers(torch.optim.Adam, {"weight_decay": 0.1}, 3)[0].param_groups[0]
    torch.set_default_dtype(default)
    try:
        assert StepKernel("cpu").covers(torch.optim.Adam, options, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_kernel
def test_nesterov_without_momentum_is_as_if_it_were_not_there() -> None:
    options = optimizers(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, 3)[0].param_groups[
        0
    ]
    assert StepKernel("cpu").covers(torch.optim.SGD, {**options, "momentum": 0}, torch.float32)


@needs_kernel
def test_numbers_beyond_fp32_are_left_to_pytorch_which_raises() -> None:
    options = optimizers(torch.optim.SGD, {"lr": 0.1}, 3)[0].param_groups[0]
    assert not StepKernel("cpu").covers(torch.optim.SGD, {**options, "lr": 1e39}, torch.float32)
    assert StepKernel("cpu").covers(torch.optim.SGD, {**options, "lr": float("nan")}, torch.float32)


@needs_kernel
def test_a_forked_process_steps_with_threads_of_its_own() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both = optimizers(torch.optim.SGD, {"lr": 0.1}, 300_000)
        give(both)
        StepKernel("cpu").step(both[0], both[0].param_groups[0]["params"])
        child = os.fork()
        if child == 0:
            StepKernel("cpu").step(both[0], both[0].param_groups[0]["params"])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_a_clip_factor_of_a_gpu_is_in_the_gradient_s_type_and_may_be_a_nan() -> None:
    """The factor of a mixed model is fp32; PyTorch converts it for 16-bit gradients before it multiplies."""
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
    nan = struct.unpack("<f", struct.pack("<I", 0x7FFFFFFF))[0]  # a GPU's
    replica = replica_of(torch.optim.SGD(parameters, lr=1.0), parameters)
    for iteration, factor in enumerate((0.3, nan)):
        parameters[0].grad = torch.full_like(parameters[0], 3.0)
        scaling = pb.Scaling(kind=pb.Scaling.CLIP, factor=factor)
        replica.step(iteration, gradients_of(replica, parameters), pb.Step(scalings=[scaling]))
        ((_, tensor, _),) = replica.read(iteration)
        expected = -3 * torch.tensor(factor, dtype=torch.bfloat16)
        assert torch.equal(tensor, expected.expand(4)) or (iteration and tensor.isnan().all())
    assert replica.comparison.exact


@needs_kernel
def test_a_replica_for_a_gpu_uses_all_threads_of_the_node() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
    replica = replica_of(torch.optim.SGD(parameters, lr=1.0), parameters)
    assert {batch.threads for batch in replica._batches} == {0}


def test_all_nans_are_alike_in_a_comparison_of_bits() -> None:
    parameters = [torch.nn.Parameter(torch.tensor([math.nan, 0.0, 1.0]))]
    replica = replica_of(torch.optim.SGD(parameters), parameters)
    for bits, messages in (
        ([0x7FFFFFFF, 0, 0x3F800000], 0),
        ([0xFFC00000, 0x80000000, 0x3F800000], 1),  # zeros of two signs are not
        ([0x3F800000, 0, 0x3F800000], 1),
    ):
        part = pb.Slice(parameter=0, data=struct.pack("<3I", *bits))
        differences_said = list(replica.comparison.compare(-1, [part], replica._parameters))
        assert len(differences_said) == messages, bits


def test_16_bit_types_of_a_cpu_are_pytorch_s_own() -> None:
    options = optimizers(torch.optim.Adam, {}, 3)[0].param_groups[0]
    assert not StepKernel("cpu").covers(torch.optim.Adam, options, torch.bfloat16)


def test_powers_end_where_they_no_longer_matter() -> None:
    powers = powers_of(0.999, torch.device("cpu"))
    assert powers is not None and len(powers) < 20_000
    assert 1 - np.float32(powers[-1]) == 1 != 1 - np.float32(powers[len(powers) // 2])
    assert float(powers[1]) == pytest.approx(0.999**2)
    assert powers_of(1.0, torch.device("cpu")) is None
    assert powers_of(1 - 1e-7, torch.device("cpu")) is None
    of_zero = powers_of(0.0, torch.device("cpu"))
    assert of_zero is not None and of_zero.tolist() == [0.0]


def test_what_is_recorded_is_known_by_its_versions() -> None:
    assert ("2.11", "cu130", "cuda sm_90") in RECORDED
    assert is_recorded("2.11.0+cu130", "cuda sm_90")
    assert not is_recorded("2.11.0+cu126", "cuda sm_90")
    assert not is_recorded("2.11.0+cu130", "cuda sm_80")
    assert not is_recorded("2.11.0", "cpu")
    assert not is_recorded("2.11.0.dev20260101+cu130", "cuda sm_90")
    assert described_device(torch.device("cpu")) == "cpu"


@needs_kernel
def test_a_replica_for_a_gpu_has_its_bits_by_defaults_of_a_script() -> None:
    """A script that chooses no implementation gets `foreach` on a GPU, and neither on this CPU."""
    variant = Variant("AdamW", {})
    of_gpu = next(
        recorded.number for recorded in recorded_variants() if recorded == Variant("AdamW", {"foreach": True})
    )
    optimizer, parameters = make(variant, "cpu")
    replica = replica_of(optimizer, parameters)
    assert replica.comparison.exact
    for step in range(1, 11):
        give_gradients(variant, step, optimizer, parameters)
        replica.step(step - 1, gradients_of(replica, parameters), pb.Step())
    read = sorted(replica.read(9), key=lambda entry: entry[0])  # not in order of numbers
    for name, tensors in {
        "p": [tensor for _, tensor, _ in read],
        "exp_avg_sq": [state["exp_avg_sq"] for _, _, state in read],
    }.items():
        bits = as_bits(torch.cat(tensors))  # type: ignore[arg-type]
        assert not len(differences(bits, vectors()[f"{of_gpu}/10/{name}"], torch.float32))


@needs_kernel
def test_a_replica_for_a_gpu_tolerates_what_the_kernel_cannot_step(caplog: pytest.LogCaptureFixture) -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in SIZES]
    assert not replica_of(torch.optim.NAdam(parameters), parameters).comparison.exact
    replica = replica_of(torch.optim.Adam(parameters), parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for iteration, (dtype, exact) in enumerate((("float32", True), ("float64", False), ("float32", False))):
        scaling = pb.Scaling(kind=pb.Scaling.CLIP, factor=0.5, dtype=dtype)
        replica.step(iteration, gradients_of(replica, parameters), pb.Step(scalings=[scaling]))
        assert replica.comparison.exact is exact
    assert caplog.text.count("was not repeated bit for bit") == 1


def replica_of(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Replica:
    """Return a replica of a job on a GPU, before iteration 0."""
    names = [str(parameter.dtype).removeprefix("torch.") for parameter in parameters]
    layout = make_layout([Parameter(f"p{n}", tuple(p.shape), names[n]) for n, p in enumerate(parameters)], 1)
    spec = spec_of(optimizer, {parameter: number for number, parameter in enumerate(parameters)})
    replica = Replica(layout, 0, spec, exact=True, arithmetic="gpu")
    for number, parameter in enumerate(parameters):
        replica.load(number, parameter.detach().clone(), {}, -1)
    return replica


def gradients_of(replica: Replica, parameters: list[torch.nn.Parameter]) -> dict[int, torch.Tensor]:
    """Return the parameters' gradients in buckets."""
    buckets = {
        n: torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype])
        for n, bucket in enumerate(replica.layout.buckets)
    }
    for number, parameter in enumerate(parameters):
        index, place = replica.layout.where[number]
        assert parameter.grad is not None
        buckets[index][place.start : place.stop] = parameter.grad
    return buckets
