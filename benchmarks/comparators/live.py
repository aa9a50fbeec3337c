"""Live recovery: the others go on without a failed rank, and it takes their state when it comes back.

This is torchft (PyPI; meta-pytorch/torchft) as its own examples use it: a manager, with a process group of
its own, in each rank. Nobody makes checkpoints. All ask a lighthouse before each iteration who takes part.
Ranks are jobs of their own, which torchrun restarts alone. A failed iteration is not committed, and is tried
again by those that are left.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket, TCPStore  # torch.distributed's, where mypy finds it
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

_SECONDS: Final = timedelta(seconds=30)
_GLOO_SECONDS: Final = timedelta(seconds=5)
"""Both as in torchft's train_ddp.py. Ranks that wait for a dead one's neighbour need the second one."""


@dataclass(frozen=True)
class Meeting:
    """The addresses at which a rank meets the others.

    Attributes:
        lighthouse: The lighthouse's URL.
        mgmt: This rank's address for coordination.
        data: Its address for state, which is sent over the network of gradients.
    """

    lighthouse: str
    mgmt: str
    data: str


class _Transport(HTTPTransport[Any]):
    """Serves state at an address: torchft's own uses the host's name, which namespaces share."""

    def __init__(self, host: str) -> None:
        self._host = host
        super().__init__(timeout=_SECONDS, num_chunks=0)

    def address(self) -> str:
        """Return the URL, to which the iteration is added."""
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"


class _Parallel(DistributedDataParallel):
    """torchft's DDP. Its own hook (0.2.0) ends the process if gloo reports an error while it waits."""

    @staticmethod
    def _comm_hook(state: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket. After an error, which the manager notes, the iteration is not committed."""
        tensor = bucket.buffer()
        state.allreduce(tensor).wait()
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        averaged.set_result(tensor)
        return averaged


class LiveRecovery:
    """A rank of a job whose ranks come and go. It makes the job's DDP, and takes its optimizer's place."""

    name = "torchft"

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._store = TCPStore(meeting.mgmt, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_GLOO_SECONDS),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            timeout=_SECONDS,
            rank=0,
            world_size=1,
            store_addr=meeting.mgmt,
            store_port=self._store.port,
            lighthouse_addr=meeting.lighthouse,
            replica_id=f"rank{rank}",
            hostname=meeting.mgmt,
            checkpoint_transport=_Transport(meeting.data),
        )

    def parallel(self, module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
        """Return a model whose gradients are averaged over the ranks that take part."""
        return _Parallel(self._manager, module, bucket_cap_mb=bucket_mb)

    def attach(self, ddp: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
        """Take over the job. Return what takes the optimizer's place."""

        def state() -> dict[str, Any]:
            return {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}

        def install(received_state: dict[str, Any]) -> None:
            ddp.module.load_state_dict(received_state["model"])
            optimizer.load_state_dict(received_state["optimizer"])

        self._manager.register_state_dict_fn("job", install, state)
        return OptimizerWrapper(self._manager, optimizer)

    def recover(self) -> int:
        """Return the next iteration. A rank that comes back learns it in its first one."""
        return int(self._manager.current_step())

    def taking_part(self) -> int:
        """Return the number of ranks that took part in the last iteration."""
        return int(self._manager.num_participants())

    def close(self) -> None:
        """Leave the job."""
        self._manager.shutdown()
