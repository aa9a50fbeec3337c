"""A small byte-level GPT: causal self-attention and dropout, about 5 million parameters by default."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
"""A token is a byte."""


@dataclass(frozen=True)
class Shape:
    """The model's size; `width` is a multiple of `heads`."""

    layers: int = 4
    width: int = 320
    heads: int = 5
    context: int = 64
    dropout: float = 0.1
    tied: bool = False
    """Whether the embedding of bytes is the head's weight, too."""


class TransformerBlock(nn.Module):
    """Attention, then a perceptron of four times the width, both residual with pre-normalisation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self._attend(self.before_attention(x))
        return x + torch.as_tensor(self.perceptron(self.before_perceptron(x)))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        parts = self.attention(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        mixed = self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return functional.dropout(mixed, self.dropout, self.training)


class Gpt(nn.Module):
    """Maps bytes to the loss of predicting each next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.layers))
        self.normal = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        if shape.tied:
            self.head.weight = self.bytes.weight
        self.apply(_initialise)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats per byte, from int64 bytes of shape (batch, time)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.bytes(inputs) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.normal(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialise(module: nn.Module) -> None:
    """Initialise like GPT-2: small weights and zero biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
