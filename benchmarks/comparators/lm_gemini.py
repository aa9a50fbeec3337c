"""Gemini's maintained successor: lm-resiliency (PyPI, by Gemini's first author) on CPU ranks, over gloo.

Each rank gives it a part of the tensors, because DDP's ranks all have the whole state. It copies them after
the step and sends the copy to the peer in the background. A checkpoint is in the processes' memory: when
ranks are ended, it writes what it has, its peer's part too, to a folder of the host, from which it loads.
Its launcher would move a lost host's part; here, hosts share the folder, so that nothing need be moved.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparators.flat import FlatState, empty, flatten, restore_state
from benchmarks.comparators.system import PartedState

_RUN = "evaluation"


class LmResiliency(PartedState):
    """Checkpoints in the memory of two hosts, by the package's own manager."""

    name = "lm-resiliency"

    def attach(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Take over the job."""
        super().attach(ddp, optimizer)
        folder = self.place.memory.parent / "lm-resiliency"
        folder.mkdir(parents=True, exist_ok=True)
        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(
                interval=self.place.interval,
                replication_jump=1,
                disk_flush_interval=0,
                disk_folder=str(folder),
                run_id=_RUN,
                pin_memory=False,
            )
        )

    def after_step(self, iteration: int) -> None:
        """Copy this rank's part, and begin to send it, once the checkpoint before has arrived."""
        if not self.is_due(iteration):
            return
        flat = flatten(self.state())
        described = io.BytesIO()
        torch.save(flat.described, described)
        tensors = [flat.tensors[number] for number in self._shares(flat)[self.rank]]
        # It counts from 1, as iterations that are complete.
        self._manager.save_tensors(tensors, iteration + 1, extra={"described": described.getvalue().hex()})

    def recover(self) -> int:
        """Install the newest checkpoint of which each rank finds its part; ranks send parts to all."""
        checkpoint = self._manager.load_tensors()
        if checkpoint is None:
            return 0
        tensors, completed, extra = checkpoint
        assert extra is not None
        described = io.BytesIO(bytes.fromhex(extra["described"]))
        flat = empty(torch.load(described, weights_only=True))
        for rank, numbers in enumerate(self._shares(flat)):
            for at, number in enumerate(numbers):
                if rank == self.rank:
                    flat.tensors[number].copy_(tensors[at])
                dist.broadcast(flat.tensors[number], rank)
        self.install(restore_state(flat))
        return int(completed)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is at the peer."""
        self._manager.finalize_replication()

    def close(self) -> None:
        """Write what is in memory, and end."""
        self._manager.flush_for_restart()
        self._manager.close()

    def _shares(self, flat: FlatState) -> list[list[int]]:
        sizes = [tensor.nbytes for tensor in flat.tensors]
        return shares(sizes, self.ranks, len(self.buffers()))


def shares(sizes: Sequence[int], ranks: int, first: int) -> list[list[int]]:
    """Divide tensors between ranks: the largest goes to who has the least.

    Args:
        sizes: Their sizes in bytes.
        ranks: The number of ranks.
        first: How many of them, from the first on, are rank 0's.

    Returns:
        Each rank's tensors by number, in order.
    """
    rank_shares: list[list[int]] = [[*range(first)], *([] for _ in range(ranks - 1))]
    loads = [sum(sizes[number] for number in share) for share in rank_shares]
    for number in sorted(range(first, len(sizes)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        rank_shares[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(share) for share in rank_shares]
