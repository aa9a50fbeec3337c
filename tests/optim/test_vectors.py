"""The step kernel against what PyTorch computed on a GPU (`vectors/`, recorded by `tools.step_vectors`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkmate.optim.kernel import StepKernel, trouble
from tools.step_vectors import (
    DIGEST_STEPS,
    DTYPES,
    STATE_STEPS,
    Bits,
    Variant,
    digest,
    give_gradients,
    make,
    recorded_state,
)

FILE = Path(__file__).parent / "vectors" / "h200-torch-2.11.0.npz"
EXACT_OPTIMIZERS = ("Adam", "AdamW", "SGD")

pytestmark = pytest.mark.skipif(bool(trouble()), reason=trouble())


@cache
def vectors() -> Any:
    return np.load(FILE)


def recorded_variants() -> list[Variant]:
    about = json.loads(bytes(vectors()["about"]))
    return [
        Variant(**{name: entry[name] for name in entry if name != "refused"}) for entry in about["variants"]
    ]


def kernel() -> StepKernel:
    """Return the kernel with the powers of that GPU.

    An early file has them for 0.999 only. Those of 0.9 reach 0 so soon that the processor's are the same.
    """
    names = [name for name in vectors() if name.startswith("powers/")]
    if names:
        return StepKernel("gpu", {float(name[7:]): vectors()[name].view(np.float32) for name in names})
    of_999 = vectors()["op/pow_scalar_tensor"].view(np.float32)
    exponents = np.arange(1, 1001)
    return StepKernel("gpu", {0.999: of_999, 0.9: (float(np.float32(0.9)) ** exponents).astype(np.float32)})


def is_exact(variant: Variant) -> bool:
    optimizer, parameters = make(variant, "cpu")
    options = optimizer.param_groups[0]
    return not variant.tensor_lr and kernel().covers(type(optimizer), options, parameters[0].dtype)


EXACT = [
    variant for variant in recorded_variants() if variant.optimizer in EXACT_OPTIMIZERS and is_exact(variant)
]


def described(variant: Variant) -> str:
    words = [f"{name}={value}" for name, value in variant.options.items()]
    extras = [name for name in ("schedule", "grad_scale") if getattr(variant, name)]
    return " ".join([variant.optimizer, variant.dtype, *words, *extras])


@pytest.mark.parametrize("variant", EXACT, ids=described)
def test_ten_steps_have_the_bits_of_the_gpu(variant: Variant) -> None:
    follow(variant, 10)


@pytest.mark.slow
@pytest.mark.parametrize("variant", EXACT, ids=described)
def test_a_thousand_steps_have_the_bits_of_the_gpu(variant: Variant) -> None:
    follow(variant, 1000)


def follow(variant: Variant, steps: int) -> None:
    """Repeat steps, and compare all bits of parameters and state where they are kept, or else a digest."""
    optimizer, parameters = make(variant, "cpu")
    stepped = kernel()
    chain = vectors()[f"{variant.number}/chain"]
    nan = False
    for step in range(1, steps + 1):
        give_gradients(variant, step, optimizer, parameters)
        stepped.step(optimizer, parameters, scale=1 / (variant.grad_scale or 1.0))
        if step not in DIGEST_STEPS:
            continue
        state = recorded_state(optimizer, parameters)
        nan = nan or any(tensor.isnan().any() for tensor in tensors_of(optimizer, parameters))
        if not nan:  # a GPU's NaNs have other bits
            expected = chain[DIGEST_STEPS.index(step)].tobytes()
            assert digest(state) == expected, f"the first difference is in step {step}"
        if step in STATE_STEPS:
            for name, bits in state.items():
                of_gpu = vectors()[f"{variant.number}/{step}/{name}"]
                dtype = torch.float32 if name.startswith("scalar_") else DTYPES[variant.dtype]
                differing = (
                    bits[bits != of_gpu] if name.startswith("scalar_") else differences(bits, of_gpu, dtype)
                )
                assert not len(differing), f"{len(differing)} elements of {name} differ after step {step}"


def tensors_of(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter
        yield from (entry for entry in optimizer.state[parameter].values() if torch.is_tensor(entry))


def differences(ours: Bits, theirs: Bits, dtype: torch.dtype) -> Bits:
    """Return the indices of elements with different bits; all NaNs count as one."""
    nan = [torch.from_numpy(bits.copy()).view(dtype).isnan().numpy() for bits in (ours, theirs)]
    return np.nonzero((ours != theirs) & ~(nan[0] & nan[1]))[0]


def test_what_is_exact_is_most_of_what_was_recorded() -> None:
    """What is left is fused: SGD with 16-bit momentum, Adam with coupled decay, or with other betas."""
    recorded = [
        variant
        for variant in recorded_variants()
        if variant.optimizer in EXACT_OPTIMIZERS and not variant.options.get("capturable")
    ]
    left = [described(variant) for variant in recorded if variant not in EXACT]
    assert len(EXACT) >= 90, left
    for words in left:
        assert "fused=True" in words and (
            "momentum" in words or "weight_decay" in words or "betas" in words
        ), words
