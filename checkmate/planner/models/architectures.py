"""The parameters of four architectures: names and shapes in registration order.

Names and order are those of torchvision (ResNet, ViT) and transformers (GPT, LLaMA), because the bucket
layout depends on the order. They are listed here because torchvision's wheels require one specific build of
torch, and transformers depends on an HTTP client and tokenizers. If these are installed, their models can be
used as well: `--model torchvision.models:resnet18`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Shaped = tuple[str, tuple[int, ...]]
"""A parameter's name and shape."""
GPT_WORDS = 50257
"""Vocabulary of GPT-2 and GPT-3 (Brown et al. 2020, section 2.1)."""
CLASSES = 1000
"""Classes of ResNet and ViT (ImageNet)."""


def _biased(name: str, *shape: int, width: int) -> Iterator[Shaped]:
    """Yield a module's weight, and its bias of `width` elements."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", (width,)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[Shaped]:
    yield from _biased(name, outputs, inputs, width=outputs)


def _norm(name: str, width: int) -> Iterator[Shaped]:
    yield from _biased(name, width, width=width)


def resnet(blocks: Sequence[int]) -> Iterator[Shaped]:
    """Yield a ResNet's parameters; `blocks` in each of its four stages (He et al. 2016, table 1)."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _norm("bn1", 64)
    inputs = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            yield from _bottleneck(f"layer{stage + 1}.{block}", inputs, 64 << stage)
            inputs = 4 * (64 << stage)
    yield from _linear("fc", inputs, CLASSES)


def _bottleneck(name: str, inputs: int, width: int) -> Iterator[Shaped]:
    """Yield the parameters of a block of three convolutions (He et al. 2016, figure 5, right)."""
    yield f"{name}.conv1.weight", (width, inputs, 1, 1)
    yield from _norm(f"{name}.bn1", width)
    yield f"{name}.conv2.weight", (width, width, 3, 3)
    yield from _norm(f"{name}.bn2", width)
    yield f"{name}.conv3.weight", (4 * width, width, 1, 1)
    yield from _norm(f"{name}.bn3", 4 * width)
    if inputs != 4 * width:
        yield f"{name}.downsample.0.weight", (4 * width, inputs, 1, 1)
        yield from _norm(f"{name}.downsample.1", 4 * width)


def vit(*, image: int, patch: int, layers: int, width: int, mlp: int) -> Iterator[Shaped]:
    """Yield the parameters of a ViT for square images of `image` pixels (Dosovitskiy et al. 2021)."""
    yield "class_token", (1, 1, width)
    yield from _biased("conv_proj", width, 3, patch, patch, width=width)
    yield "encoder.pos_embedding", (1, (image // patch) ** 2 + 1, width)  # patches, and the class token
    for layer in range(layers):
        name = f"encoder.layers.encoder_layer_{layer}"
        yield from _norm(f"{name}.ln_1", width)
        yield f"{name}.self_attention.in_proj_weight", (3 * width, width)
        yield f"{name}.self_attention.in_proj_bias", (3 * width,)
        yield from _linear(f"{name}.self_attention.out_proj", width, width)
        yield from _norm(f"{name}.ln_2", width)
        yield from _linear(f"{name}.mlp.0", width, mlp)
        yield from _linear(f"{name}.mlp.3", mlp, width)
    yield from _norm("encoder.ln", width)
    yield from _linear("heads.head", width, CLASSES)


def gpt(*, layers: int, width: int, context: int) -> Iterator[Shaped]:
    """Yield the parameters of GPT-2 or GPT-3 (Radford et al. 2019, section 2.3).

    The output projection shares the word embedding's. Projections are stored as inputs x outputs.
    """
    yield "transformer.wte.weight", (GPT_WORDS, width)
    yield "transformer.wpe.weight", (context, width)
    for layer in range(layers):
        name = f"transformer.h.{layer}"
        yield from _norm(f"{name}.ln_1", width)
        yield from _biased(f"{name}.attn.c_attn", width, 3 * width, width=3 * width)
        yield from _biased(f"{name}.attn.c_proj", width, width, width=width)
        yield from _norm(f"{name}.ln_2", width)
        yield from _biased(f"{name}.mlp.c_fc", width, 4 * width, width=4 * width)
        yield from _biased(f"{name}.mlp.c_proj", 4 * width, width, width=width)
    yield from _norm("transformer.ln_f", width)


def llama(*, words: int, layers: int, width: int, mlp: int, keys: int) -> Iterator[Shaped]:
    """Yield the parameters of LLaMA 2 or 3 (Touvron et al. 2023): grouped-query attention, no biases.

    `keys` is the width of keys and of values: head size times groups.
    """
    yield "model.embed_tokens.weight", (words, width)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", (width, width)
        yield f"{name}.self_attn.k_proj.weight", (keys, width)
        yield f"{name}.self_attn.v_proj.weight", (keys, width)
        yield f"{name}.self_attn.o_proj.weight", (width, width)
        yield f"{name}.mlp.gate_proj.weight", (mlp, width)
        yield f"{name}.mlp.up_proj.weight", (mlp, width)
        yield f"{name}.mlp.down_proj.weight", (width, mlp)
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (words, width)
