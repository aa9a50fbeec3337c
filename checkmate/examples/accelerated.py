"""Train with Hugging Face Accelerate, which makes DDP, optimizer and loader ready.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.accelerated

`prepare` returns a DistributedDataParallel, and a wrapper whose `optimizer` is PyTorch's own. Checkmate takes
these two. With a seedable sampler the order of an epoch follows from its number, so a resumed run skips the
batches that are used up.
(`pip install accelerate`)
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import checkmate
from checkmate.examples.common import LossLog, parser

ROWS, INPUTS, BATCH = 640, 32, 16


def data() -> TensorDataset:
    """Return random inputs with a target that a small model can learn."""
    inputs = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.cumsum(1).tanh())


def main() -> None:
    """Train, and print the loss of each iteration."""
    options = parser("checkmate.examples.accelerated", __doc__, 60).parse_args()
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=options.seed)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    torch.manual_seed(options.seed)  # the same model on all ranks
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, INPUTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Its own generator: Accelerate's iterators draw from it late, so dropout would differ in a resumed run.
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True, generator=torch.Generator())
    ddp, prepared, batches = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(options.seed + 1 + accelerator.process_index)  # different dropout on each rank

    iteration, extra = checkmate.restore(ddp, prepared.optimizer)
    epoch, batches_used = extra or (0, 0)
    protection = checkmate.protect(ddp, prepared.optimizer, extra=lambda: (epoch, batches_used))
    log = LossLog(options.out)

    with protection:
        while iteration < options.iterations:
            batches.set_epoch(epoch)
            for inputs, targets in protection.steps(accelerator.skip_first_batches(batches, batches_used)):
                loss = functional.mse_loss(ddp(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
                log(iteration, loss.item())
                iteration, batches_used = iteration + 1, batches_used + 1
                if iteration == options.iterations:
                    break
            epoch, batches_used = epoch + 1, 0
    log.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    accelerator.end_training()


if __name__ == "__main__":
    main()
