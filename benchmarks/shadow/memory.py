"""A shadow node's memory beyond parameters, optimizer state and two iterations of gradients.

A `checkmate shadow` process follows a small training of 25 million parameters over loopback, without readers.
Socket buffers belong to the kernel, and are not part of a process's resident memory.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from benchmarks.figures import Figure, Result, Skipped, number
from testbed.copies import local_job
from testbed.measured_node import train_with_node

TITLE: Final = "Shadow node, memory: 25 million fp32 parameters, AdamW, 2 NICs, without readers"


def measure() -> list[Result]:
    """Measure one node once."""
    if os.geteuid() != 0:
        return [Skipped("shadow_memory", "needs root, for receive buffers")]
    training, empty, peaks = train_with_node(local_job(nodes=1, ranks=2))
    parameters = sum(parameter.nbytes for parameter in training.parameters)
    state = sum(
        value.nbytes
        for values in training.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    minimum = parameters + state + 2 * parameters
    beyond = [100 * (peak - empty - minimum) / minimum for peak in peaks]
    note = f"of {number(minimum / 1e6, 'MB')}; an empty node takes {number(empty / 1e6, 'MB')}"
    return [
        Figure(
            "beyond parameters, optimizer state and two iterations of gradients",
            tuple(beyond),
            "%",
            10.0,
            10.0,
            smaller=True,
            note=note,
        )
    ]
