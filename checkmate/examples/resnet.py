"""Train a small ResNet: channels_last, BatchNorm, autocast, and on CUDA a GradScaler.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.resnet

On a GPU autocast computes in FP16, whose small gradients vanish unless a GradScaler scales the loss. On a CPU
it computes in BF16, which has FP32's range: a scaler would do nothing useful there, so it is disabled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.examples.common import LossLog, add_device, parser

CLASSES = 4


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm; the input is added, through a 1x1 convolution if shapes differ."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, inside, height, width) to (batch, outside, height / stride, width / stride)."""
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def resnet(width: int = 16) -> nn.Module:
    """Return a ResNet of three blocks for images of 3 x 16 x 16."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


def images(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise in which one quadrant is brighter, in channels_last, and the quadrants as labels."""
    labels = torch.randint(CLASSES, (size,))
    pictures = torch.randn(size, 3, 2, 8, 2, 8)
    pictures[torch.arange(size), :, labels // 2, :, labels % 2] += 0.5
    whole = pictures.view(size, 3, 16, 16).to(device, memory_format=torch.channels_last)
    return whole, labels.to(device)


def main() -> None:
    """Train, and print the loss of each iteration."""
    options_of = parser("checkmate.examples.resnet", __doc__, 60)
    add_device(options_of)
    options = options_of.parse_args()
    device: torch.device = options.device
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)  # the same model on all ranks
    model = resnet().to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # before DDP, which follows it
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # different images on each rank

    start, _ = checkmate.restore(ddp, optimizer, scaler=scaler)
    protection = checkmate.protect(ddp, optimizer, scaler=scaler)
    log = LossLog(options.out)

    with protection:
        for iteration in protection.steps(range(start, options.iterations)):
            inputs, labels = images(32, device)
            with torch.autocast(device.type, dtype=dtype):
                loss = functional.cross_entropy(ddp(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log(iteration, loss.item())
    log.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
