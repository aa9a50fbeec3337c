"""A double of PyTorch's NCCL on CPUs: it calls the plugin as NCCL's threads do, and reduces as NCCL does."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any, Final

import torch
import torch.distributed as dist

from checkmate.nccl.building import shared_object
from checkmate.nccl.environment import Version, slicing_of
from checkmate.nccl.library import NcclPlace
from checkmate.training.start import exchange
from checkmate.training.start.nccl_runtime import Communicator
from checkmate.training.start.places import Place
from checkmate.wire.nccl_slicing import NcclSend, NcclSlicing
from tests.support.nccl.calls import RELEASES, Caller
from tests.support.nccl.ring import RingChannel

_IN_FLIGHT: Final = 8
"""Sends of a channel that are not done: parts of a connection's buffer."""
_POLL_SECONDS: Final = 0.00005
_SECONDS: Final = 60.0
_TYPES: Final = {
    torch.float64: "ncclFloat64",
    torch.float32: "ncclFloat32",
    torch.float16: "ncclFloat16",
    torch.bfloat16: "ncclBfloat16",
}


def nccl_place(place: Place, interface: str) -> NcclPlace:
    """Return a rank's place as the plugin has it."""
    addresses = [IPv4Address(ip) for ip in place.ips]
    return NcclPlace(place.position, place.ranks, addresses[place.position], interface, peers=addresses)


@dataclass(frozen=True)
class DoubleNccl:
    """NCCL of a release, such as 2.29, for models on the CPU."""

    release: str = "2.29"
    slicing: NcclSlicing | None = None
    """Another slicing than that of the release."""

    def version(self) -> Version:
        """Return the version."""
        major, minor = map(int, self.release.split("."))
        return major, minor, 5

    def device(self, number: int) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def trouble(self, devices: Collection[torch.device]) -> str:
        """Return ""."""
        return ""

    def open(self, place: Place, device: torch.device) -> Communicator:
        """Connect the ranks through the plugin; without it, over gloo."""
        groups = [dist.new_group([rank.rank for rank in group.ranks]) for group in place.job.dp_groups]
        number = exchange.broadcast(secrets.randbits(32), 0) + place.group
        caller = Caller(shared_object(), RELEASES.get(self.release, RELEASES["2.30"]))
        is_refused = bool(
            caller.init(number, place.ranks, place.ranks, place.position) or caller.properties()
        )
        if len(set(exchange.gather(is_refused))) > 1:
            raise RuntimeError("some ranks have the plugin, and others another network")
        if is_refused:
            return GlooCommunicator(groups[place.group])
        slicing = self.slicing or slicing_of(self.version(), {})
        return PluginCommunicator(caller, number, slicing, place)


class GlooCommunicator:
    """AllReduces over gloo, as NCCL's own network would carry them."""

    device = torch.device("cpu")
    stream = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None:
        """Reduce a tensor."""
        if average:
            tensor /= dist.get_world_size(self._group)
        dist.all_reduce(tensor, group=self._group)

    def synchronize(self) -> None:
        """Return at once: nothing is in progress."""

    def abort(self) -> None:
        """Do nothing: nothing is in progress."""

    def close(self) -> None:
        """Leave the group to the end of the process."""


class PluginCommunicator:
    """AllReduces over the plugin's connections, with a thread for each channel."""

    device = torch.device("cpu")
    stream = None

    def __init__(self, caller: Caller, comm_hash: int, slicing: NcclSlicing, place: Place) -> None:
        self._caller, self._hash, self._slicing, self._place = caller, comm_hash, slicing, place
        self._channels = range(place.job.channels)
        listeners = [caller.listen() for _ in self._channels]
        all_handles = exchange.gather([handle.hex() for handle, _ in listeners])
        ranks = place.job.dp_groups[place.group].ranks
        next_ = ranks[(place.position + 1) % place.ranks].rank
        self._listening = [listening for _, listening in listeners]
        handles = [ctypes.create_string_buffer(bytes.fromhex(text)) for text in all_handles[next_]]
        self._senders = [0] * len(handles)
        self._receivers = [0] * len(handles)
        deadline = time.monotonic() + _SECONDS
        while not all(self._senders) or not all(self._receivers):
            assert time.monotonic() < deadline, "the ranks do not connect"
            for channel, handle in enumerate(handles):
                self._senders[channel] = self._senders[channel] or caller.connect(handle) or 0
                self._receivers[channel] = (
                    self._receivers[channel] or caller.accept(self._listening[channel]) or 0
                )
            time.sleep(_POLL_SECONDS)
        self._threads = ThreadPoolExecutor(len(handles), thread_name_prefix="NCCL Progress")

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None:
        """Reduce a tensor in place. Raise `RuntimeError` if a connection broke."""
        if average:  # as NCCL, which multiplies before it sums
            tensor /= self._place.ranks
        elements, itemsize = len(tensor), tensor.element_size()
        used_channels = self._slicing.used_channels(elements, itemsize, len(self._channels))
        announced = (
            len(self._channels) if self._caller.versions.profiler == 3 else used_channels
        )  # 2.26 tells the maximum
        coll = self._caller.coll(
            tensor.data_ptr(), elements, _TYPES[tensor.dtype], announced, comm_hash=self._hash
        )
        running = [self._threads.submit(self._run, coll, channel, tensor) for channel in range(used_channels)]
        for future in running:
            future.result()

    def synchronize(self) -> None:
        """Return at once: `all_reduce` waits."""

    def abort(self) -> None:
        """Do nothing: threads end with an error when a connection breaks."""

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for comm in self._senders:
            self._caller.close_send(comm)
        for comm in self._receivers:
            self._caller.close_receive(comm)
        for listening in self._listening:
            self._caller.close_listen(listening)

    def _run(self, coll: int | None, channel: int, tensor: torch.Tensor) -> None:
        """Be the proxy of a channel and the kernel that feeds it."""
        place = self._place
        part = self._slicing.part(len(tensor), tensor.element_size(), len(self._channels), channel)
        op = self._caller.proxy_op(coll, channel, (place.position + 1) % place.ranks)
        ring = RingChannel(self._slicing, part, place.ranks, place.position)
        in_flight: deque[tuple[int, torch.Tensor]] = deque()
        for send, contents in ring.run(tensor, self._receiver(channel, tensor.dtype)):
            step = self._caller.proxy_step(op, send.step)
            in_flight.append(self._send(channel, contents.clone(), step))
            if len(in_flight) == _IN_FLIGHT:
                self._finish(in_flight[0][0])
                in_flight.popleft()  # its memory was sent
        for request, _ in in_flight:
            self._finish(request)

    def _send(self, channel: int, contents: torch.Tensor, step: int | None) -> tuple[int, torch.Tensor]:
        """Return the request of a send, and its memory."""
        place = ctypes.c_void_p(contents.data_ptr())
        while True:
            result, request = self._caller.isend(self._senders[channel], place, contents.nbytes, step)
            _check(result)
            if request is not None:
                return request, contents
            time.sleep(_POLL_SECONDS)

    def _receiver(self, channel: int, dtype: torch.dtype) -> Callable[[NcclSend], torch.Tensor]:
        def receive(send: NcclSend) -> torch.Tensor:
            room = torch.empty(max(1, len(send.where)), dtype=dtype)
            nbytes = len(send.where) * room.element_size()
            memory: Any = (ctypes.c_char * room.nbytes).from_address(room.data_ptr())
            request = None
            while request is None:
                result, request = self._caller.irecv(self._receivers[channel], memory, nbytes)
                _check(result)
            assert self._finish(request) == nbytes
            return room[: len(send.where)]

        return receive

    def _finish(self, request: int) -> int:
        """Wait until a request is done; return its size."""
        while True:
            result, size = self._caller.test(request)
            _check(result)
            if size is not None:
                return size
            time.sleep(_POLL_SECONDS)


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"NCCL error {result}")
