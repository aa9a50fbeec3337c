"""NCCL, in PyTorch's hands: its version, and the communicator of gradients."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from checkmate.job import boundaries
from checkmate.nccl.environment import Version
from checkmate.nccl.environment import slicing_of as nccl_slicing
from checkmate.training.errors import SessionError
from checkmate.training.model.trained import TrainedModel
from checkmate.training.start.places import Place
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import Slicing

_LIBRARY: Final = "libnccl.so.2"


def slicing_of(place: Place, model: TrainedModel) -> Slicing:
    """Return how the job's collective slices buckets.

    Raises:
        SessionError: This rank has no NCCL for its model, or NCCL_BUFFSIZE is not supported.
    """
    if place.job.copies == "host":
        return PartSlicing()
    if place.job.collective != "nccl":
        return boundaries.slicing(place.job, place.group)
    return slicing_for(place, {parameter.device for parameter in model.trained().values()})


def slicing_for(place: Place, devices: Collection[torch.device]) -> Slicing:
    """Return how NCCL slices buckets on these devices. Raise `SessionError` as `slicing_of`."""
    if trouble := runtime.trouble(devices):
        raise SessionError(f"{place.name}: {trouble}")
    try:
        return nccl_slicing(runtime.version(), os.environ)
    except ValueError as error:
        raise SessionError(f"{place.name}: {error}") from None


class Communicator(Protocol):
    """NCCL's communicator of a DP group's gradients. It has a launch for each call, in order."""

    @property
    def device(self) -> torch.device:
        """The device that has its tensors."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream on which it works; `None` if its calls return when they are done."""

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None:
        """Launch an AllReduce in place, of the average or the sum. Raise `RuntimeError` after an error."""

    def synchronize(self) -> None:
        """Wait until everything launched is done."""

    def abort(self) -> None:
        """End everything launched, without the other ranks."""

    def close(self) -> None:
        """End it, if it was not aborted together with the other ranks."""


class NcclRuntime(Protocol):
    """The part of PyTorch's NCCL that Checkmate needs."""

    def version(self) -> Version:
        """Return NCCL's version."""

    def device(self, number: int) -> torch.device:
        """Return this host's GPU of a number."""

    def trouble(self, devices: Collection[torch.device]) -> str:
        """Return why it can't reduce gradients on these devices, or ""."""

    def open(self, place: Place, device: torch.device) -> Communicator:
        """Make the communicator of a rank's DP group. All ranks of the job call it."""


class TorchCommunicator:
    """A process group of backend nccl."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None:
        """Launch an AllReduce on the stream, after what the current one has. The process does not wait."""
        operator = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a CUDA graph would capture it: leave backward out of CUDA graphs")
            work: Any = dist.all_reduce(tensor, op=operator, group=self._group, async_op=True)
            work.wait()  # the stream waits, not the process

    def synchronize(self) -> None:
        """Wait until everything launched is done."""
        assert self.stream is not None
        self.stream.synchronize()

    def abort(self) -> None:
        """Abort the communicator."""
        backend: Any = self._group._get_backend(self.device)
        backend.abort()

    def close(self) -> None:
        """Destroy the process group, unless the script has destroyed all."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def loaded_version(library: ctypes.CDLL) -> Version:
    """Return what ncclGetVersion of a library returns: 10000 major + 100 minor + patch, since NCCL 2.9."""
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


class TorchNccl:
    """PyTorch's NCCL on this rank's GPU."""

    def version(self) -> Version:
        """Return the version of the NCCL that this process has loaded; users may install another one.

        `torch.cuda.nccl.version` is the one with which PyTorch was compiled.
        """
        with suppress(OSError):
            library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            return loaded_version(library)
        major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
        return major, minor, patch

    def device(self, number: int) -> torch.device:
        """Return this host's GPU of a number."""
        return torch.device("cuda", number)

    def trouble(self, devices: Collection[torch.device]) -> str:
        """Return why it can't reduce gradients on these devices, or ""."""
        names = sorted({str(device) for device in devices})
        if any(device.type != "cuda" for device in devices):
            return (
                f"the model is on {', '.join(names)}, and collective: nccl needs it on a GPU: move it there "
                "before DDP, or set collective: ring or tree in the job file"
            )
        if len(names) > 1:
            return f"the model is on {', '.join(names)}, and collective: nccl needs one GPU for each rank"
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            return "this PyTorch has no NCCL or no GPU: install one for CUDA, or set collective: ring or tree"
        return ""

    def open(self, place: Place, device: torch.device) -> Communicator:
        """Make a process group for each DP group, as torch requires of all ranks. Return this rank's."""
        own_group: dist.ProcessGroup | None = None
        for number, group in enumerate(place.job.dp_groups):
            options = dist.ProcessGroupNCCL.Options()
            options.config.min_ctas = options.config.max_ctas = place.job.channels
            process_group = dist.new_group(
                [rank.rank for rank in group.ranks], backend="nccl", pg_options=options
            )
            if number == place.group:
                own_group = process_group
        assert own_group is not None
        return TorchCommunicator(own_group, device)


runtime: NcclRuntime = TorchNccl()
"""Tests put a double in its place."""
