"""Steps of SGD, Adam and AdamW by a compiled kernel: in one pass over memory, with the bits of PyTorch's own.

`step.c` has the arithmetic, of PyTorch on a CPU and on a GPU. It is compiled for a type of elements when they
are first stepped. For trainers' CPUs it takes the place of PyTorch's steps once it has repeated one here, in
all bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from checkmate.base.cache import CompilerRefused, c_compiler, compiled
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import same_bits

_log: Final = logging.getLogger("checkmate")

SOURCE: Final = Path(__file__).with_name("step.c")
PACKAGES: Final = "apt-get install gcc libc6-dev"
"""Debian's names of the packages that the compilation needs."""
TYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_FACTORS: Final = 4
"""Factors by which a gradient can be multiplied within a step."""
_FLAGS: Final = (
    *("-std=c11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fvisibility=hidden"),
)
_THREAD_ELEMENTS: Final = 1 << 16
"""Elements from which a further thread is worth its start."""
_CUT_ELEMENTS: Final = 64
"""Threads share tensors at multiples of this number, which are whole vectors and cache lines."""
RECORDED: Final = frozenset({("2.11", "cu130", "cuda sm_90")})
"""PyTorch's version, CUDA's, and the device whose steps are recorded, and equal the kernel's in all bits."""
MAX_POWERS: Final = 1 << 20
_VERSION: Final = re.compile(r"(?P<release>\d+\.\d+)\.\d+\+(?P<cuda>cu\d+)")
"""A version that was released, not one of those built each night."""
_NEGLIGIBLE: Final = 2.0**-25
"""1 - x is 1 in fp32, from this x on."""
_RULES: Final = {"cpu": 0, "gpu": 1, "gpu fused": 2}
_COUPLED, _DECOUPLED = 1, 2
_MOMENTUM, _NESTEROV = 1, 2

Arithmetic = Literal["cpu", "gpu"]
"""The devices whose bits are repeated."""
Options = Mapping[str, Any]


class KernelError(RuntimeError):
    """The kernel can't be compiled or loaded; the message has the reason and the remedy."""


class _Step(ctypes.Structure):
    """`struct step` of `step.c`."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("rule", "decay", "momentum", "negated")),
        ("square_roots", ctypes.c_void_p),
        ("set_mkl_threads", ctypes.c_void_p),
    ]


_TENSORS: Final = ("parameter", "gradient", "first", "second", "greatest")
_RUN: Final = np.dtype(
    [
        *((name, np.uint64) for name in _TENSORS),
        ("elements", np.uint64),
        ("factors", np.uint64),
        ("factor", np.float32, MAX_FACTORS),
        ("numbers", np.float32, 8),
    ]
)
"""`struct run` of `step.c`."""


@dataclass(frozen=True)
class StepKernel:
    """Steps with the arithmetic of PyTorch on one kind of device.

    `powers` has, for each beta of a fused Adam on a GPU, its powers from the first on, as that GPU computes
    them in fp32: they are not those of a CPU.
    """

    arithmetic: Arithmetic
    powers: Mapping[float, np.ndarray[Any, np.dtype[np.float32]]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: pb.OptimizerSpec, arithmetic: Arithmetic) -> StepKernel:
        """Return the kernel for the steps of a spec."""
        return cls(
            arithmetic, {powers.base: np.frombuffer(powers.values, np.dtype("<f4")) for powers in spec.powers}
        )

    def covers(self, kind: type[torch.optim.Optimizer], options: Options, dtype: torch.dtype) -> bool:
        """Return whether steps of these options, for parameters of this type, have the same bits here."""
        if kind not in _NUMBERS or not _are_numbers(kind, options) or options.get("capturable"):
            return False
        fused = bool(options.get("fused"))
        if self.arithmetic == "cpu":
            # With 16-bit types, PyTorch's bits depend on its number of threads. Its fused step is as fast.
            return dtype is torch.float32 and not fused and _repeats(kind.__name__, _signature(kind, options))
        if fused and kind is not torch.optim.SGD:
            if not {*options["betas"]} <= self.powers.keys():
                return False
            # Of four elements, that kernel rounds the gradient's decay otherwise in the first: by alignment.
            coupled = bool(options["weight_decay"]) and not _is_decoupled(kind, options)
            return not coupled and _library(dtype) is not None
        if fused and options["momentum"] and dtype is not torch.float32:
            return False
        return _library(dtype) is not None

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        factors: Sequence[Sequence[float]] = (),
        scale: float = 1.0,
    ) -> None:
        """Step parameters that have a gradient, all of one type, which `covers` has allowed.

        The optimizer's state of them is created as PyTorch does, and changed in place.

        Args:
            optimizer: An optimizer of one group.
            parameters: Some of its parameters, contiguous.
            factors: For each, by what its gradient is multiplied before, in order; at most `MAX_FACTORS`.
            scale: By what a fused step multiplies gradients, without rounding: the inverse loss scale.
        """
        (options,) = optimizer.param_groups
        kind = type(optimizer)
        runs = np.zeros(len(parameters), _RUN)
        numbers: dict[float, Sequence[float | np.floating[Any]]] = {}
        for run, parameter, of_gradient in zip(
            runs, parameters, factors or [()] * len(parameters), strict=True
        ):
            state = optimizer.state[parameter]
            assert parameter.grad is not None
            tensors = [parameter.detach(), parameter.grad]
            if kind is torch.optim.SGD:
                run["numbers"][:4], buffer = _sgd_numbers(options, state, parameter)
                tensors += [] if buffer is None else [buffer]
            else:
                _begin_adam(options, state, parameter)
                state["step"] += 1
                count = state["step"].item()
                if count not in numbers:
                    numbers[count] = self._adam_numbers(kind, options, count, scale)
                run["numbers"] = np.asarray(numbers[count], np.float32)
                tensors += [state["exp_avg"], state["exp_avg_sq"]]
                tensors += [state["max_exp_avg_sq"]] if options["amsgrad"] else []
            for name, tensor in zip(_TENSORS, tensors, strict=False):  # of which a step may lack the last
                run[name] = tensor.data_ptr()
            run["elements"] = parameter.numel()
            run["factors"] = len(of_gradient)
            # A NaN of a GPU has bits that rounding would carry into the sign: here is one that it does not.
            run["factor"][: len(of_gradient)] = [math.nan if math.isnan(f) else f for f in of_gradient]
        dtype = parameters[0].dtype
        library = _library(dtype)
        assert library is not None
        _in_threads(library, self._step(kind, options), runs)

    def _step(self, kind: type[torch.optim.Optimizer], options: Options) -> _Step:
        rule = "gpu fused" if options.get("fused") and self.arithmetic == "gpu" else self.arithmetic
        decay = momentum = 0
        if options["weight_decay"]:
            decay = _DECOUPLED if _is_decoupled(kind, options) else _COUPLED
        if kind is torch.optim.SGD and options["momentum"]:
            momentum = _NESTEROV if options["nesterov"] else _MOMENTUM
        mkl = _mkl() if rule == "cpu" else (None, None)
        return _Step(_RULES[rule], decay, momentum, bool(options["maximize"]), *mkl)

    def _adam_numbers(
        self, kind: type[torch.optim.Optimizer], options: Options, count: float, scale: float
    ) -> Sequence[float | np.floating[Any]]:
        """Return the numbers of a step, as `torch.optim` computes them: in doubles, or fused in fp32."""
        rate, (beta_1, beta_2), decay = float(options["lr"]), options["betas"], options["weight_decay"]
        decoupled = _is_decoupled(kind, options)
        if self.arithmetic == "gpu" and options.get("fused"):
            f = np.float32
            power_1, power_2 = (self._power(beta, int(count)) for beta in (beta_1, beta_2))
            size, root = f(rate) / (f(1) - power_1), np.sqrt(f(1) - power_2)
            by = f(rate) * f(decay) if decoupled else decay
            return (by, beta_1, beta_2, size, root, options["eps"], scale, 0.0)
        correction_1, correction_2 = 1 - beta_1**count, 1 - beta_2**count
        by = decay if decay and not decoupled else 1 - rate * decay
        root = correction_2**0.5
        # A GPU divides by a number by way of its reciprocal, but `foreach` divides by a list of numbers.
        reciprocal = self.arithmetic == "gpu" and not _is_foreach(options)
        return (
            *(by, 1 - beta_1, beta_2, 1 - beta_2),
            *(1 / root if reciprocal else root, options["eps"], -(rate / correction_1), float(reciprocal)),
        )

    def _power(self, beta: float, count: int) -> np.float32:
        """Return a power of beta as the trainers' GPU computes it; far enough, it no longer matters."""
        powers = self.powers[beta]
        return powers[count - 1] if count <= len(powers) else np.float32(0)


def fits_kernel(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether a parameter's state, if it has any, is of its type, and as the kernel goes over it."""
    state = optimizer.state.get(parameter)
    if not state:
        return True
    (options,) = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD:
        tensors = [state.get("momentum_buffer")] if options["momentum"] else []
        tensors = [tensor for tensor in tensors if tensor is not None]
    else:
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else []))
        tensors = [state.get(name) for name in names]
        step = state.get("step")
        if not isinstance(step, torch.Tensor) or step.numel() != 1 or not step.is_floating_point():
            return False
    return all(
        isinstance(tensor, torch.Tensor)
        and (tensor.dtype, tensor.shape) == (parameter.dtype, parameter.shape)
        and tensor.is_contiguous()
        for tensor in (parameter, *tensors)
    )


def described_device(device: torch.device) -> str:
    """Return the device as nodes are told it: a GPU with its architecture, such as "cuda sm_90"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor}"


def is_recorded(version: str, device: str) -> bool:
    """Return whether steps of a version of PyTorch are recorded, on a device as `described_device` has it."""
    match = _VERSION.fullmatch(version)
    return match is not None and (match["release"], match["cuda"], device) in RECORDED


def powers_of(beta: float, device: torch.device) -> torch.Tensor | None:
    """Return a number's powers in fp32 from the first on, by a device, or `None` if there are too many.

    They end when they are too small to change 1 in a subtraction.
    """
    if not 0 <= beta < 1:
        return None
    count = 1 if beta == 0 else math.ceil(math.log(_NEGLIGIBLE) / math.log(beta)) + 1
    if count > MAX_POWERS:
        return None
    exponents = torch.arange(1, count + 1, device=device, dtype=torch.float32)
    return torch.tensor(beta, device=device, dtype=torch.float32) ** exponents


def compile_for(types: Iterable[torch.dtype]) -> None:
    """Compile the kernel for types of elements, unless it is in the cache: a second or two for each."""
    for dtype in types:
        if dtype in TYPES:
            _library(dtype)


def trouble() -> str:
    """Return why this machine has no kernel, or "". Compiles the one for fp32, which takes a second once."""
    try:
        _load(torch.float32)
    except KernelError as error:
        return str(error)
    return ""


@cache
def _mkl() -> tuple[int | None, int | None]:
    """Return the addresses of MKL's square roots, and of its number of threads, if PyTorch has MKL here."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None, None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        functions = library.vmsSqrt, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None, None
    square_roots, threads = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return square_roots, threads


_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
_NUMBERS: Final[Mapping[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: ("lr", "weight_decay", "momentum", "dampening", "maximize", "nesterov"),
    torch.optim.Adam: ("lr", "weight_decay", "eps", "maximize", "amsgrad"),
    torch.optim.AdamW: ("lr", "weight_decay", "eps", "maximize", "amsgrad"),
}
"""The options that a step reads, which are numbers; Adam has `betas`, too."""


def _are_numbers(kind: type[torch.optim.Optimizer], options: Options) -> bool:
    """Return whether the options that a step computes with are there, as Python's numbers, not tensors."""
    values = [options.get(name) for name in _NUMBERS[kind]]
    betas = options.get("betas", (None,)) if kind is not torch.optim.SGD else ()
    # Also NumPy's double, which is a float; but its powers, of betas, need not be Python's.
    return all(map(_is_float32, values)) and all(type(beta) is float for beta in betas)


def _is_float32(value: object) -> bool:
    """Return whether a value is a number in fp32's range, beyond which PyTorch raises."""
    return isinstance(value, (int, float)) and (not math.isfinite(value) or abs(value) <= _MAX_FLOAT32)


def _is_decoupled(kind: type[torch.optim.Optimizer], options: Options) -> bool:
    return bool(options.get("decoupled_weight_decay", kind is torch.optim.AdamW))


def _is_foreach(options: Options) -> bool:
    """Return whether a step on a GPU is `foreach`: PyTorch's choice there unless the script has made one."""
    return bool(options.get("foreach") or (options.get("foreach") is None and options.get("fused") is None))


def _begin_adam(options: Options, state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Create the state of a parameter's first step, as `torch.optim.Adam` does."""
    if state:
        return
    double = torch.get_default_dtype() == torch.float64 and not options.get("fused")
    state["step"] = torch.tensor(0.0, dtype=torch.float64 if double else torch.float32)
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options["amsgrad"])
    state.update({name: torch.zeros_like(parameter) for name in names})


def _sgd_numbers(
    options: Options, state: dict[str, Any], parameter: torch.Tensor
) -> tuple[Sequence[float], torch.Tensor | None]:
    """Return the numbers of SGD's step, and its momentum buffer if it has one, which the first step makes."""
    decay, momentum, rate = options["weight_decay"], options["momentum"], -options["lr"]
    if not momentum:
        return (decay, 0.0, 0.0, rate), None
    buffer: torch.Tensor | None = state.get("momentum_buffer")
    if buffer is not None:
        return (decay, momentum, 1 - options["dampening"], rate), buffer
    # The first momentum is the gradient itself: -0.0 is the number that changes no other by its addition.
    state["momentum_buffer"] = buffer = torch.full_like(parameter, -0.0)
    return (decay, momentum, 1.0, rate), buffer


def _in_threads(library: ctypes.CDLL, step: _Step, runs: np.ndarray[Any, Any]) -> None:
    """Step all runs, by as many threads as torch has, this one among them."""
    elements = int(runs["elements"].sum())
    threads = max(1, min(torch.get_num_threads(), elements // _THREAD_ELEMENTS))
    bounds = [elements * number // threads // _CUT_ELEMENTS * _CUT_ELEMENTS for number in range(threads)]

    def part(number: int) -> None:
        stop = bounds[number + 1] if number + 1 < threads else elements
        library.checkmate_step(ctypes.byref(step), runs.ctypes.data, len(runs), bounds[number], stop)

    futures = [_pool(threads - 1).submit(part, number) for number in range(1, threads)]
    part(0)
    for future in futures:
        future.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "step")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernel for a type of elements, or `None`, which is logged once, if there is none here."""
    try:
        return _load(dtype)
    except KernelError as error:
        _log.info("optimizer steps are PyTorch's own: %s", error)
        return None


def _load(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernel for a type of elements, compiled unless it is in the cache. Raise `KernelError`."""
    if dtype not in TYPES:
        raise KernelError(f"the step kernel has no {dtype}")
    flags = (*_FLAGS, f"-DTYPE={TYPES[dtype]}", f"-DPROCESSOR={_processor()}")
    try:
        path = compiled(f"step-{TYPES[dtype].lower()}.so", [SOURCE], flags, lambda: _command(flags))
        library = ctypes.CDLL(str(path))
    except CompilerRefused as error:
        raise KernelError(f"the C compiler refused the step kernel ({error}): {PACKAGES}") from None
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a folder you can write to"
        raise KernelError(f"no access to the compiled step kernel ({error}): {remedy}") from None
    library.checkmate_step.argtypes = [
        *(ctypes.POINTER(_Step), ctypes.c_void_p),
        *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64),
    ]
    library.checkmate_step.restype = None
    return library


def _command(flags: Sequence[str]) -> list[str]:
    compiler = c_compiler()
    if compiler is None:
        raise KernelError(f"the step kernel needs a C compiler: {PACKAGES}")
    return [compiler, *flags, str(SOURCE), "-lm"]


@cache
def _processor() -> str:
    """Return a digest of this processor's abilities, because a home may be on machines with others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    abilities = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(abilities).encode()).hexdigest()[:12]


_Signature = tuple[tuple[str, object], ...]


def _signature(kind: type[torch.optim.Optimizer], options: Options) -> _Signature:
    """Return what decides which operations a step has."""
    switches = ("foreach", "amsgrad", "maximize", "nesterov", "decoupled_weight_decay")
    signature = {name: options[name] for name in switches if name in options}
    signature |= {name: bool(options[name]) for name in ("weight_decay", "momentum") if name in options}
    if not options.get("momentum"):
        signature.pop("nesterov", None)  # which then does nothing, and which PyTorch's constructor refuses
    if "betas" in options:
        signature["near"] = 1 - options["betas"][0] < 0.5
    return tuple(sorted(signature.items(), key=lambda item: item[0]))


@cache
def _repeats(name: str, signature: _Signature) -> bool:
    """Return whether the kernel repeats steps of PyTorch on this machine's CPU, in all bits of fp32.

    What PyTorch's own loops fuse depends on how it was compiled, and on the processor.
    """
    if _library(torch.float32) is None:
        return False
    # Small parameters and large steps: otherwise few errors of a step reach a parameter's last bit.
    options: dict[str, Any] = {"lr": 0.3, **dict(signature)}
    for number, value in (("weight_decay", 0.1), ("momentum", 0.9)):
        if number in options:
            options[number] *= value
    if "near" in options:
        options["betas"] = (0.9 if options.pop("near") else 0.3, 0.95)
    kind = {kind.__name__: kind for kind in _NUMBERS}[name]
    if kind is torch.optim.AdamW:
        options.pop("decoupled_weight_decay", None)
    generator = torch.Generator().manual_seed(1)

    def draw(size: int) -> torch.Tensor:
        # The present default type is the trainers'.
        return torch.randn(size, generator=generator, dtype=torch.float32)

    sizes = (4099, 64, 7, 1)
    both = [[draw(size) * 0.01 for size in sizes]]
    both.append([tensor.clone() for tensor in both[0]])
    pytorch, kernel_stepped = (kind(tensors, **options) for tensors in both)
    for _ in range(3):
        gradients = [draw(size) for size in sizes]
        gradients[0][:64] *= 1e-38  # subnormal squares
        special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38], dtype=torch.float32)
        gradients[0][64:70] = special
        for tensors in both:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient.clone()
        pytorch.step()
        StepKernel("cpu").step(kernel_stepped, both[1])
    same = all(
        same_bits(*pair)
        for tensor, its_twin in zip(*both, strict=True)
        for pair in zip(_tensors(pytorch, tensor), _tensors(kernel_stepped, its_twin), strict=True)
    )
    if not same:
        _log.info("%s is stepped by PyTorch itself: here the step kernel has other bits", name)
    return same


def _tensors(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> list[torch.Tensor]:
    entries = optimizer.state[tensor]
    return [tensor, *(entries[name] for name in sorted(entries) if isinstance(entries[name], torch.Tensor))]
