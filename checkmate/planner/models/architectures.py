"""The parameters of four architectures: names, shapes and registration order, without a forward pass.

On the meta device they need no memory. Names and order are those of torchvision (ResNet, ViT) and
transformers (GPT, LLaMA), because the bucket layout depends on the order. They are defined here because
torchvision's wheels require one specific build of torch, and transformers depends on an HTTP client and
tokenizers. If these are installed, their models can be used as well: `--model torchvision.models:resnet18`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

GPT_WORDS = 50257
"""Vocabulary of GPT-2 and GPT-3 (Brown et al. 2020, section 2.1)."""


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions (He et al. 2016, figure 5, right)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        if inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))


class ResNet(nn.Module):
    """ResNet of bottlenecks for 1,000 classes; `blocks` in each of its four stages (He et al., table 1)."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            made = []
            for block in range(count):
                made.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(inputs, 1000)


class EncoderBlock(nn.Module):
    """ViT's layer (Dosovitskiy et al. 2021, figure 1, right)."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp), nn.GELU(), nn.Dropout(), nn.Linear(mlp, width), nn.Dropout()
        )


class Encoder(nn.Module):
    """ViT's encoder: a position for each patch and one for the class token."""

    def __init__(self, positions: int, layers: int, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, positions, width))
        blocks = [(f"encoder_layer_{i}", EncoderBlock(width, heads, mlp)) for i in range(layers)]
        self.layers = nn.Sequential(OrderedDict(blocks))
        self.ln = nn.LayerNorm(width)


class VisionTransformer(nn.Module):
    """ViT for square images of `image` pixels and 1,000 classes."""

    def __init__(self, *, image: int, patch: int, layers: int, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.encoder = Encoder((image // patch) ** 2 + 1, layers, width, heads, mlp)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(width, 1000)))


class Projection(nn.Module):
    """A linear layer with the weight's shape as in GPT-2: inputs x outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))


class GptBlock(nn.Module):
    """GPT-2's layer (Radford et al. 2019, section 2.3), and GPT-3's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Module()
        self.attn.c_attn = Projection(width, 3 * width)
        self.attn.c_proj = Projection(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Module()
        self.mlp.c_fc = Projection(width, 4 * width)
        self.mlp.c_proj = Projection(4 * width, width)


class GptArchitecture(nn.Module):
    """GPT-2 or GPT-3. The output projection shares the word embedding's parameter."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(GPT_WORDS, width)
        self.transformer.wpe = nn.Embedding(context, width)
        self.transformer.h = nn.ModuleList(GptBlock(width) for _ in range(layers))
        self.transformer.ln_f = nn.LayerNorm(width)


class LlamaBlock(nn.Module):
    """LLaMA's layer (Touvron et al. 2023): grouped-query attention, gated MLP, no biases."""

    def __init__(self, width: int, mlp: int, keys: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        for name, inputs, outputs in (
            ("q_proj", width, width),
            ("k_proj", width, keys),
            ("v_proj", width, keys),
            ("o_proj", width, width),
        ):
            self.self_attn.add_module(name, nn.Linear(inputs, outputs, bias=False))
        self.mlp = nn.Module()
        for name, inputs, outputs in (
            ("gate_proj", width, mlp),
            ("up_proj", width, mlp),
            ("down_proj", mlp, width),
        ):
            self.mlp.add_module(name, nn.Linear(inputs, outputs, bias=False))
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


class Llama(nn.Module):
    """LLaMA 2 or 3. `keys` is the width of keys and of values: head size times groups."""

    def __init__(self, *, words: int, layers: int, width: int, mlp: int, keys: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(words, width)
        self.model.layers = nn.ModuleList(LlamaBlock(width, mlp, keys) for _ in range(layers))
        self.model.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
