"""Checks of copies by hosts: what ranks send and keep, beside the checks of shadow nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from checkmate.planner.capacity import misfits
from checkmate.planner.capacity.misfits import Check
from checkmate.planner.capacity.plan import Capacity
from checkmate.planner.part_demand import PartDemand
from checkmate.planner.units import show_enough


def checks(capacity: Capacity, demand: PartDemand) -> list[Check]:
    """Return all possible checks of a job with copies by hosts, with paths in its YAML."""
    rules = (misfits.receiving, misfits.stepping, misfits.memory)
    return [*_ranks(capacity, demand), *(check for rule in rules if (check := rule(capacity)))]


def unchecked(capacity: Capacity) -> list[str]:
    """Return resources that were not checked, and the option that is missing."""
    texts = list(capacity.unchecked)
    if capacity.limits.pcie_bits_per_s is None:
        texts.append("copies from GPUs to their host's memory: add --pcie-rate")
    if capacity.limits.host_memory is None:
        texts.append("the pinned memory of training hosts: add --host-memory")
    return texts


def host_name(demand: PartDemand) -> str:
    """Return the host of the rank that sends most, for people."""
    rank = f"rank {demand.busiest_rank.rank}"
    return rank if demand.gpus_per_host == 1 else f"a host of {demand.gpus_per_host} ranks"


def _ranks(capacity: Capacity, demand: PartDemand) -> Iterator[Check]:
    """Yield checks of the rank that sends most, whose host's other ranks are taken to send as much."""
    limits, rank, ranks = capacity.limits, demand.busiest_rank, demand.gpus_per_host
    path = ("ranks" if demand.job.mesh is None else "mesh",)
    where = host_name(demand)
    if limits.iteration_s is not None:
        nbytes = ranks * rank.sent_bytes
        yield _within_an_iteration(
            Check(
                "sending copies",
                where,
                8 * nbytes / demand.link_bits_per_s,
                limits.iteration_s,
                "s",
                path,
            ),
            f"sends {nbytes / 1e9:.3g} GB of copies an iteration",
            f"links of {show_enough(8 * nbytes / limits.iteration_s / 1e9)} Gbit/s",
        )
    if limits.iteration_s is not None and limits.pcie_bits_per_s is not None:
        seconds = 8 * rank.part_bytes / limits.pcie_bits_per_s
        yield _within_an_iteration(
            Check("copying from the GPU", f"rank {rank.rank}", seconds, limits.iteration_s, "s", path),
            f"copies {rank.part_bytes / 1e9:.3g} GB from its GPU an iteration",
            f"{show_enough(8 * rank.part_bytes / limits.iteration_s / 1e9)} Gbit/s from its GPU",
        )
    if limits.host_memory is not None:
        nbytes = ranks * rank.host_memory
        wrong = change = ""
        if nbytes > limits.host_memory:
            wrong = f"needs {nbytes / 1e9:.3g} GB of pinned memory and has {limits.host_memory / 1e9:.3g} GB"
            change = f"it would fit with hosts of {show_enough(nbytes / 1e9)} GB for it"
        yield Check("pinned memory", where, nbytes, limits.host_memory, "bytes", path, wrong, change)


def _within_an_iteration(check: Check, work: str, enough: str) -> Check:
    if check.needed <= check.available:
        return check
    wrong = f"{work}, which takes {check.needed:.3g} s of {check.available:g} s"
    return Check(
        check.resource,
        check.where,
        check.needed,
        check.available,
        check.unit,
        check.path,
        wrong,
        f"it would fit with {enough}, or with more ranks in a DP group",
    )
