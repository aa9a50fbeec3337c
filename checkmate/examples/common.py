"""What the examples share: options, the loss of each iteration, and the final state."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import checkmate


def parser(module: str, doc: str | None, iterations: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples have."""
    arg_parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg_parser.add_argument("--iterations", type=int, default=iterations, help=f"default: {iterations}")
    arg_parser.add_argument("--seed", type=int, default=1)
    arg_parser.add_argument("--out", type=Path, help="folder for losses and the final state; none by default")
    return arg_parser


def add_device(arg_parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`, of which this machine must have one."""
    arg_parser.add_argument("--device", type=_device, default="cpu", help="cpu, cuda, or cuda and a number")


def _device(text: str) -> torch.device:
    """Return the device of that name. Raise `ArgumentTypeError` if this machine has none."""
    try:
        torch.empty(0, device=text)
        return torch.device(text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text} can't be used here: {reason}") from None


def add_in_place(arg_parser: argparse.ArgumentParser) -> None:
    """Add the option `--in-place`."""
    arg_parser.add_argument(
        "--in-place", action="store_true", help="keep this process when another rank dies: `checkmate launch`"
    )


def run(train: Callable[[], None], *, in_place: bool, backend: str = "gloo") -> None:
    """Train with a default process group, which recovery in place makes for each attempt."""
    if in_place:
        checkmate.resilient(train, backend=backend)
        return
    dist.init_process_group(backend)
    train()
    dist.destroy_process_group()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a model's parameters and optimizer state by name, whole and on rank 0. All ranks call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, stepped = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": stepped}


class LossLog:
    """Shows the loss of each iteration: rank 0 prints it, and all ranks append it to `rank{r}.jsonl`."""

    def __init__(self, folder: Path | None) -> None:
        """Make the folder, if one is given; `torch.distributed` must be initialised."""
        self._folder, self._rank = folder, dist.get_rank()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, iteration: int, loss: float) -> None:
        """Show this rank's loss of an iteration."""
        if self._rank == 0:
            print(f"iteration {iteration}: loss {loss:.6f}", flush=True)
        if self._folder is not None:
            with Path(self._folder, f"rank{self._rank}.jsonl").open("a") as file:
                print(json.dumps({"iteration": iteration, "loss": loss}), file=file)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the final state to `final.pt`, on rank 0."""
        if self._folder is not None and self._rank == 0:
            torch.save(dict(state), self._folder / "final.pt")
