"""Models by name, and any `module:function`: their trained parameters, without data.

The nine named ones are the paper's (table "Models and configurations used in the evaluation"), each as
published, in the precision in which the paper trains it (section "Experimental Setup").
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from checkmate.base.wording import counted
from checkmate.planner.models.architectures import Shaped, gpt, llama, resnet, vit
from checkmate.wire.parameter import ITEMSIZES, Parameter

_LAYER = re.compile(r"(?:[^.]*_)?\d+")


class ModelError(ValueError):
    """A model is unknown or cannot be built; the message has a correction."""

    exit_code = 2


@dataclass(frozen=True)
class NamedModel:
    """A model of the paper. `parameters` is their number, as published in `source`."""

    name: str
    shapes: Callable[[], Iterator[Shaped]]
    dtype: str
    parameters: int
    source: str


NAMED_MODELS: Final = (
    NamedModel(
        "ResNet50", partial(resnet, (3, 4, 6, 3)), "float32", 25_557_032, "torchvision, ResNet50_Weights"
    ),
    NamedModel(
        "ResNet152", partial(resnet, (3, 8, 36, 3)), "float32", 60_192_808, "torchvision, ResNet152_Weights"
    ),
    NamedModel(
        "ViT-H-14",
        partial(vit, image=518, patch=14, layers=32, width=1280, mlp=5120),
        "float32",
        633_470_440,
        "torchvision, ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1: images of 518 pixels, the paper's 633.5M",
    ),
    NamedModel(
        "GPT2-1.5B",
        partial(gpt, layers=48, width=1600, context=1024),
        "bfloat16",
        1_557_611_200,
        "transformers, gpt2-xl; Radford et al. 2019, table 2",
    ),
    NamedModel(
        "GPT3-XL",
        partial(gpt, layers=24, width=2048, context=2048),
        "bfloat16",
        1_315_723_264,
        "Brown et al. 2020, table 2.1: 1.3B; 24 layers of 2,048, context 2,048",
    ),
    NamedModel(
        "GPT3-6.7B",
        partial(gpt, layers=32, width=4096, context=2048),
        "bfloat16",
        6_658_404_352,
        "Brown et al. 2020, table 2.1: 6.7B; 32 layers of 4,096, context 2,048",
    ),
    NamedModel(
        "LLaMA2-7B",
        partial(llama, words=32_000, layers=32, width=4096, mlp=11_008, keys=4096),
        "bfloat16",
        6_738_415_616,
        "transformers, Llama-2-7b's config.json",
    ),
    NamedModel(
        "LLaMA2-13B",
        partial(llama, words=32_000, layers=40, width=5120, mlp=13_824, keys=5120),
        "bfloat16",
        13_015_864_320,
        "transformers, Llama-2-13b's config.json",
    ),
    NamedModel(
        "LLaMA3-8B",
        partial(llama, words=128_256, layers=32, width=4096, mlp=14_336, keys=1024),
        "bfloat16",
        8_030_261_248,
        "transformers, Meta-Llama-3-8B's config.json; Llama 3 report, table 3",
    ),
)
"""The nine models of the paper."""

_BY_NAME: Final[Mapping[str, NamedModel]] = {model.name.lower(): model for model in NAMED_MODELS}


@dataclass(frozen=True, eq=False)
class Model:
    """A model's trained parameters in registration order, as training lays them out. Equal only to itself."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, and so of an iteration's gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


def load_model(name: str, dtype: str | None = None) -> Model:
    """Load a model without its data.

    Args:
        name: a model's name (upper or lower case), or `module:function` that returns an `nn.Module`.
        dtype: type of all parameters, by its name in torch; by default the model's own.

    Returns:
        The model.

    Raises:
        ModelError: if the model is unknown or cannot be built.
    """
    if dtype is not None and dtype not in ITEMSIZES:
        raise ModelError(f"no type {dtype} for gradients; supported: {', '.join(ITEMSIZES)}")
    named_model = _BY_NAME.get(name.lower())
    if named_model is not None:
        gradient_type = dtype or named_model.dtype
        return Model(
            named_model.name,
            tuple(
                Parameter(parameter_name, shape, gradient_type)
                for parameter_name, shape in named_model.shapes()
            ),
        )
    if ":" not in name:
        names = ", ".join(model.name for model in NAMED_MODELS)
        raise ModelError(f"no model {name}; use {names}, or module:function")
    module = _from_function(name)
    for unknown, weights in module.named_parameters():
        if is_lazy(weights):
            raise ModelError(
                f"{name}: {unknown} has no shape before the first batch; use a module with explicit sizes "
                "instead of a lazy one"
            )
    parameters = tuple(
        Parameter(parameter_name, tuple(p.shape), dtype or str(p.dtype).removeprefix("torch."))
        for parameter_name, p in module.named_parameters()
        if p.requires_grad
    )
    if not any(parameter.elements for parameter in parameters):
        raise ModelError(f"{name} has no parameter that needs a gradient")
    for parameter in parameters:
        if parameter.dtype not in ITEMSIZES:
            raise ModelError(f"{name}: {parameter.name} has type {parameter.dtype}; add --dtype")
    return Model(name, parameters)


def layers_of(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Group parameters by repeated block (`layers.0`), and others by module."""
    layers: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        *modules, _ = parameter.name.split(".")
        deep = next((i for i, part in enumerate(modules) if _LAYER.fullmatch(part)), len(modules) - 1)
        layers.setdefault(".".join(modules[: deep + 1]), []).append(parameter)
    return list(layers.values())


def stages_of(model: Model, stages: int) -> list[Model]:
    """Cut a model into similar pipeline stages of whole layers. Raise `ModelError` if it has too few."""
    if stages == 1:
        return [model]
    runs: list[list[Parameter]] = [[] for _ in range(stages)]
    before = 0
    for layer in layers_of(model.parameters):
        nbytes = sum(parameter.nbytes for parameter in layer)
        runs[min((2 * before + nbytes) * stages // (2 * model.nbytes), stages - 1)] += layer
        before += nbytes
    if not all(runs):
        layers = len(layers_of(model.parameters))
        raise ModelError(
            f"{model.name} has {counted(layers, 'layer')}, which cannot be balanced over {stages} DP groups; "
            "use --model once for each DP group"
        )
    return [Model(f"{model.name}, stage {i}", tuple(run)) for i, run in enumerate(runs)]


def sharded(model: Model, parts: int) -> Model:
    """Return what one of `parts` ranks has of a model, at most: a chunk of the first dimension of each."""
    if parts == 1:
        return model
    chunks = (
        replace(
            parameter,
            shape=(-(-parameter.shape[0] // parts), *parameter.shape[1:]) if parameter.shape else (),
        )
        for parameter in model.parameters
    )
    return Model(f"{model.name}, 1/{parts}", tuple(chunks))


def _from_function(name: str) -> nn.Module:
    module_name, _, path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        target: object = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"model {name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ModelError(f"model {name}: importing {module_name} failed: {_error_text(error)}") from error
    if not callable(target):
        raise ModelError(f"model {name}: {path} is not a function; it must return an nn.Module")
    try:
        with torch.device("meta"):
            module = target()
    except (Exception, SystemExit) as error:
        raise ModelError(f"model {name}: {path}() failed: {_error_text(error)}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"model {name}: {path}() returned a {type(module).__name__}, not an nn.Module")
    return module


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
