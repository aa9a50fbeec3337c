"""Record what torch.optim's steps compute on this machine's GPU, to the bit.

python -m tools.step_vectors OUT.npz                  on the GPU, in about a minute
python -m tools.step_vectors OUT.npz --device cpu     on the CPU, for comparison

For each variant of an optimizer, the file has parameters and state after some steps, and digests after many.
`tests/optim/test_vectors.py` compares the steps of shadow nodes with them, on any machine. Gradients are not
in the file: `gradient` makes them from a seed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.progress import track

from checkmate.optim.kernel import powers_of

SIZES: Final = (640, 257, 127)
"""Elements of the three parameters."""
STATE_STEPS: Final = (1, 2, 10, 1000)
"""Steps after which all bits are recorded."""
DIGEST_STEPS: Final = (*range(1, 21), *range(50, 1001, 50))
"""Steps after which eight bytes of SHA-256 over all tensors are recorded."""
STEPS: Final = 1000
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Bits = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Variant:
    """An optimizer with options, for parameters of a type.

    `schedule`: the learning rate changes with each step (`scheduled`). `tensor_lr`: it is a tensor.
    `grad_scale`: gradients are scaled by it, and a fused step unscales them.
    """

    optimizer: str
    options: Mapping[str, Any]
    dtype: str = "fp32"
    schedule: bool = False
    tensor_lr: bool = False
    grad_scale: float | None = None
    number: int = field(default=-1, compare=False)


def variants() -> Iterator[Variant]:
    """Return all that are recorded."""
    implementations = ({"foreach": False}, {"foreach": True}, {"fused": True})
    adam: tuple[dict[str, Any], ...] = (
        {},
        {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"amsgrad": True, "weight_decay": 0.01},
        {"maximize": True},
    )
    sgd: tuple[dict[str, Any], ...] = (
        {},
        {"momentum": 0.9},
        {"weight_decay": 1e-4},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 5e-4, "maximize": True},
    )
    for name, implementation, dtype in itertools.product(("Adam", "AdamW"), implementations, DTYPES):
        for options in adam:
            yield Variant(name, {**options, **implementation}, dtype)
        if dtype != "fp16":
            yield Variant(name, {"lr": 1e-3, **implementation}, dtype, schedule=True)
    for name, (dtype, scale) in itertools.product(("Adam", "AdamW"), (("fp32", 65536.0), ("bf16", 1024.0))):
        yield Variant(name, {"lr": 1e-3, "fused": True}, dtype, grad_scale=scale)
    for options, implementation, dtype in itertools.product(sgd, implementations, DTYPES):
        yield Variant("SGD", {"lr": 0.01, **options, **implementation}, dtype)
    rest: dict[str, tuple[dict[str, Any], ...]] = {
        "Adagrad": ({"lr": 0.01}, {"lr": 0.01, "lr_decay": 1e-3, "weight_decay": 0.01}),
        "RMSprop": ({}, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
        "Adadelta": ({}, {"weight_decay": 0.01}),
        "Adamax": ({}, {"weight_decay": 0.01}),
        "NAdam": ({}, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
        "RAdam": ({}, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
        "ASGD": ({}, {"weight_decay": 0.01}),
        "Rprop": ({},),
    }
    for name, its_options in rest.items():
        for options, implementation, dtype in itertools.product(
            its_options, implementations[:2], ("fp32", "bf16")
        ):
            yield Variant(name, {**options, **implementation}, dtype)


def scheduled(step: int) -> float:
    """Return the learning rate of a step in a variant with a schedule."""
    return 1e-3 * (0.5 + 0.5 * ((step * 7919) % 1000) / 1000)


def initial(dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of all parameters before the first step, zeros and extremes among them."""
    values = _values(sum(SIZES), 1, -12, 1)
    values[5:9] = 0.0, -0.0, 1e-41, 6e4 if dtype is torch.float16 else 3e38
    return torch.from_numpy(values).to(dtype)


def gradient(step: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return the gradient of all elements in a step.

    The first 512 have usual sizes, the next 256 are tiny to subnormal, then come 128 huge ones, sparse ones,
    zeros of both signs, and in step 7 a NaN and infinities.
    """
    count = sum(SIZES)
    half = dtype is torch.float16
    values = _values(count, 1000 + step, -16, -2)
    tiny = _values(count, 500_000 + step, -24 if half else -126, -14 if half else -70)
    if not half:
        tiny[::3] *= np.float32(2.0**-20)
    values[512:768] = tiny[512:768]
    values[768:896] = _values(count, 900_000 + step, 2, 12 if half else 60)[768:896]
    bits = _random_bits(count, 700_000 + step)
    values[896:960][(bits[896:960] & np.uint64(3)) != 0] = 0.0
    values[960:992] = np.where(bits[960:992] & np.uint64(1), np.float32(0.0), np.float32(-0.0))
    if step == 7:
        values[1000:1003] = np.nan, np.inf, -np.inf
    with np.errstate(over="ignore"):
        values = values * np.float32(scale)
    return torch.from_numpy(values).to(dtype)


def as_bits(tensor: torch.Tensor) -> Bits:
    """Return a tensor's bits as integers."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits: Bits = tensor.detach().cpu().contiguous().view(integers).numpy()
    return bits


def recorded_state(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> dict[str, Bits]:
    """Return parameters and state, each concatenated over all parameters; numbers have `scalar_` in front."""
    tensors = {"p": torch.cat([parameter.detach() for parameter in parameters])}
    states = [optimizer.state[parameter] for parameter in parameters]
    for name in sorted(states[0]):
        entries = [state.get(name) for state in states]
        if all(torch.is_tensor(entry) and entry.numel() > 1 for entry in entries):
            tensors[name] = torch.cat(entries)
        elif entries[0] is not None:
            scalars = [
                entry.cpu() if torch.is_tensor(entry) else torch.tensor(entry, dtype=torch.float64)
                for entry in entries
            ]
            tensors[f"scalar_{name}"] = torch.stack([scalar.reshape(()) for scalar in scalars])
    return {name: as_bits(tensor) for name, tensor in tensors.items()}


def make(variant: Variant, device: str) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """Return a variant's optimizer and parameters, before the first step."""
    parts = torch.split(initial(DTYPES[variant.dtype]), list(SIZES))
    parameters = [torch.nn.Parameter(part.clone().to(device)) for part in parts]
    options = dict(variant.options)
    if variant.tensor_lr:
        options["lr"] = torch.tensor(options["lr"], device=device)
    return getattr(torch.optim, variant.optimizer)(parameters, **options), parameters


def give_gradients(
    variant: Variant, step: int, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> None:
    """Give parameters the gradients of a step, and the optimizer its learning rate."""
    whole = gradient(step, DTYPES[variant.dtype], variant.grad_scale or 1.0)
    for parameter, part in zip(parameters, torch.split(whole, list(SIZES)), strict=True):
        parameter.grad = part.clone().to(parameter.device)
    if variant.schedule:
        optimizer.param_groups[0]["lr"] = scheduled(step)


def record(variant: Variant, device: str) -> dict[str, Bits]:
    """Return what a variant computes, by step and name; `chain` has the digests."""
    optimizer, parameters = make(variant, device)
    if variant.grad_scale:
        vars(optimizer).update(
            grad_scale=torch.tensor(variant.grad_scale, device=device),
            found_inf=torch.zeros((), device=device),
        )
    recorded: dict[str, Bits] = {}
    chain = bytearray()
    for step in range(1, STEPS + 1):
        give_gradients(variant, step, optimizer, parameters)
        optimizer.step()
        if step in DIGEST_STEPS:
            state = recorded_state(optimizer, parameters)
            chain += digest(state)
            if step in STATE_STEPS:
                recorded.update({f"{step}/{name}": bits for name, bits in state.items()})
    return {**recorded, "chain": np.frombuffer(bytes(chain), np.uint64)}


def digest(state: Mapping[str, Bits]) -> bytes:
    """Return eight bytes of SHA-256 over all tensors, sorted by name."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(state[name].tobytes())
    return sha.digest()[:8]


def main() -> None:
    """Record all variants."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.step_vectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; --device cpu records the CPU's steps")
    arrays: dict[str, Bits] = {}
    index = []
    for number, variant in enumerate(track(list(variants()), "variants")):
        index.append({**asdict(variant), "number": number})
        arrays.update({f"{number}/{name}": bits for name, bits in record(variant, options.device).items()})
    for beta in sorted(
        {beta for variant in variants() for beta in variant.options.get("betas", (0.9, 0.999))}
    ):
        if (powers := powers_of(beta, torch.device(options.device))) is not None:
            arrays[f"powers/{beta}"] = as_bits(powers)
    about = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": _device_name(options.device),
        "sizes": SIZES,
        "steps": STEPS,
        "kept": STATE_STEPS,
        "variants": index,
    }
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(options.out, **arrays)  # type: ignore[arg-type]


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _random_bits(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, 2**64, count, dtype=np.uint64)


def _values(count: int, seed: int, low: int, high: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers of random signs and mantissas, whose exponents are even between powers of two."""
    bits = _random_bits(count, seed)
    sign = ((bits >> np.uint64(63)) & np.uint64(1)).astype(np.uint32) << np.uint32(31)
    mantissa = (bits & np.uint64(0x7FFFFF)).astype(np.uint32)
    span = np.uint64(high - low + 1)
    exponent = (127 + low + ((bits >> np.uint64(23)) & np.uint64(0xFFFF)) % span).astype(np.uint32)
    return (sign | (exponent << np.uint32(23)) | mantissa).view(np.float32)


if __name__ == "__main__":
    main()
