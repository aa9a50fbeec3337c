"""Train from a DataLoader with workers, and resume in the middle of an epoch.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.loader

torchdata's StatefulDataLoader knows which batches are used up, even though its workers fetch some ahead. Its
state travels with each iteration's record, by `extra`. (`pip install torchdata`)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import checkmate
from checkmate.examples.common import LossLog, parser

ROWS, INPUTS, BATCH = 640, 32, 16


class NoisySines(Dataset[torch.Tensor]):
    """Noisy sines of random frequency. The random numbers of a row depend on its index only.

    The workers' own generators are not restored, so what they draw would differ in a resumed run.
    """

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(row)
        frequency = torch.rand((), generator=generator)
        return (torch.arange(INPUTS) * frequency).sin() + 0.05 * torch.randn(INPUTS, generator=generator)


def main() -> None:
    """Train, and print the loss of each iteration."""
    options = parser("checkmate.examples.loader", __doc__, 60).parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)  # the same model on all ranks
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, INPUTS))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # different dropout on each rank
    data = NoisySines()
    sampler = StatefulDistributedSampler(data)
    loader = StatefulDataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=1)

    epoch = 0
    iteration, extra = checkmate.restore(ddp, optimizer)
    if extra is not None:
        epoch = extra["epoch"]
        sampler.set_epoch(epoch)
        loader.load_state_dict(extra["loader"])
    protection = checkmate.protect(
        ddp, optimizer, extra=lambda: {"epoch": epoch, "loader": loader.state_dict()}
    )
    log = LossLog(options.out)

    with protection:
        while iteration < options.iterations:
            sampler.set_epoch(epoch)
            for rows in protection.steps(loader):
                loss = functional.mse_loss(ddp(rows), rows)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                log(iteration, loss.item())
                iteration += 1
                if iteration == options.iterations:
                    break
            epoch += 1
    log.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
