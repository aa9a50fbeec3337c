"""The number of shadow nodes that a model needs, from a profile: step, receiving, memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.planner.cost.model import STREAMS_PER_DP_GROUP
from checkmate.planner.demand import socket_bytes
from checkmate.planner.models.named import Model
from checkmate.planner.models.optimizers import NamedOptimizer
from checkmate.planner.scaling import StepTimes, largest_share, predicted
from checkmate.planner.units import NODES_MAX
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.hold_plans import SETS
from checkmate.wire.parameter import ITEMSIZES


@dataclass(frozen=True)
class Sizing:
    """Demand on the fullest of `nodes` nodes. `memory_bytes` includes `socket_bytes`."""

    nodes: int
    cores: int
    step_seconds: float
    receive_seconds: float
    memory_bytes: int
    socket_bytes: int
    short_of: tuple[str, ...]
    """Resources that do not suffice: `step`, `receiving`, `memory`."""


@dataclass(frozen=True)
class Machine:
    """A shadow node. `receive_bytes_per_s` is for all NICs, `receive_buffer` per stream."""

    cores: int
    memory: int
    receive_bytes_per_s: float
    channels: int = 1
    receive_buffer: int = RECEIVE_BUFFER

    @property
    def socket_bytes(self) -> int:
        """Memory of one shard's streams: from both boundaries, on each channel."""
        return socket_bytes(STREAMS_PER_DP_GROUP * self.channels, self.receive_buffer)


def sizing(
    model: Model,
    optimizer: NamedOptimizer,
    times: StepTimes,
    machine: Machine,
    nodes: int,
    iteration_s: float | None,
) -> Sizing:
    """Return the demand of a model on `nodes` machines, compared with the time of an iteration if given.

    One iteration is stepped while the next is received, so each of both must fit separately.
    """
    share = largest_share(model, nodes)
    step = predicted(times, model, nodes, machine.cores)
    receive = share * model.nbytes / machine.receive_bytes_per_s
    memory = round(share * memory_of(model, optimizer)) + machine.socket_bytes
    exceeded = {
        "step": iteration_s is not None and step > iteration_s,
        "receiving": iteration_s is not None and receive > iteration_s,
        "memory": memory > machine.memory,
    }
    short = tuple(resource for resource, is_over in exceeded.items() if is_over)
    return Sizing(nodes, nodes * machine.cores, step, receive, memory, machine.socket_bytes, short)


def sizings(
    model: Model,
    optimizer: NamedOptimizer,
    times: StepTimes,
    machine: Machine,
    iteration_s: float | None,
    least: int = 4,
) -> tuple[list[Sizing], Sizing | None]:
    """Return sizings from 1 node to at least `least` nodes, and the smallest that suffices, or `None`."""
    result: list[Sizing] = []
    enough: Sizing | None = None
    for nodes in range(1, NODES_MAX + 1):
        candidate = sizing(model, optimizer, times, machine, nodes, iteration_s)
        result.append(candidate)
        if enough is None and not candidate.short_of:
            enough = candidate
        if enough is not None and nodes >= least:
            break
    return result, enough


def memory_of(model: Model, optimizer: NamedOptimizer) -> int:
    """Return a model's memory: parameters and state, twice (readers may keep a copy), and gradients.

    Without socket buffers, which do not depend on the model.
    """
    return sum(
        p.elements * (2 * (ITEMSIZES[p.dtype] + optimizer.state_bytes(p.dtype)) + SETS * ITEMSIZES[p.dtype])
        for p in model.parameters
    )
