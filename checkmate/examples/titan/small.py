"""torchtitan's configuration of a small llama with two layers, whose text and tokens need no download."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _build_llama3_layers
from torchtitan.models.llama3.config_registry import llama3_debugmodel

LAYERS, HEADS, CONTEXT, BATCH = 2, 16, 128, 2
STEPS = 100
"""The steps for which the learning rate is planned, so that runs of other lengths have the same one."""
MARK = 256
"""The token before and after a text; all others are bytes."""


class ByteTokenizer(BaseTokenizer):
    """Makes a token of each byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        """Create it. Nothing is read."""
        super().__init__()
        self.eos_id = MARK

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return a text's tokens."""
        return [MARK] * add_bos + list(text.encode()) + [MARK] * add_eos

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return bytes(token for token in tokens if token != MARK).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return MARK + 1


def config(iterations: int, seed: int) -> Any:
    """Return the configuration of a run in two replicas of two shards each.

    Args:
        iterations: How many steps to train.
        seed: Of the parameters.
    """
    text_datasets.DATASETS["topics"] = DatasetConfig(
        path="",
        loader=lambda path: Dataset.from_list([{"text": topics[name]} for name in sorted(topics)]),
        sample_processor=lambda row: row["text"],
    )
    configuration = llama3_debugmodel()
    configuration.tokenizer = ByteTokenizer.Config()
    configuration.dataloader.dataset = "topics"
    model = configuration.model_spec.model
    model.layers = _build_llama3_layers(
        n_layers=LAYERS,
        dim=model.dim,
        n_heads=HEADS,
        hidden_dim=4 * model.dim,
        rope=model.layers[0].attention.rope,
        fuse_qkv=False,  # else torchtitan's state_dict() has other keys than the parameters' names
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention needs a GPU
    configuration.activation_checkpoint = None
    configuration.training.seq_len, configuration.training.local_batch_size = CONTEXT, BATCH
    configuration.training.steps, configuration.lr_scheduler.total_steps = iterations, STEPS
    configuration.training.disable_cuda_graphs = True
    configuration.parallelism.data_parallel_replicate_degree = 2
    configuration.parallelism.data_parallel_shard_degree = 2
    configuration.parallelism.spmd_backend = "partial_dtensor"
    configuration.validator.enable = False
    configuration.comm.trace_buf_size = 0
    configuration.debug.seed = seed
    return configuration
