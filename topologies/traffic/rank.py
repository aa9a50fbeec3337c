"""One rank of a lab: it gathers tensors repeatedly, checks them, and reports the bytes that it tagged.

All ranks get the same configuration.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from checkmate.ring.collectives import AllGather, Collective
from checkmate.ring.connections import Connections, Ring, connect_ring
from checkmate.ring.place import DEFAULT_PORT, RingError, RingPlace
from checkmate.ring.steps import SLICE_BYTES, Position, allgather_steps, allreduce_steps
from checkmate.tagger import Tagger, TaggerError
from checkmate.tree.connections import Tree, connect_tree
from checkmate.tree.engine import TreeEngine
from checkmate.tree.progress import links
from checkmate.wire import tag as wire
from checkmate.wire.ring_sockets import TREE_PORT
from checkmate.wire.schedule import SIDES, Bucket, chunk_sent, chunk_slice, side_of
from checkmate.wire.tree import TreeSlicing, tree_place
from topologies.describe.topology import BadDescription
from topologies.traffic.digests import Digests, StrictModel, TaggedStream, Tail, Whole, read_config

_PERIOD = 4_194_301  # a prime, so that misplaced bytes are not right by chance


class Contents:
    """Every byte of every bucket in each iteration, as a function of the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        noise = torch.randint(
            0, 256, (_PERIOD,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        # Two periods, so that a run of _PERIOD bytes can start anywhere in the first.
        self._noise = torch.cat([noise, noise])
        self._scratch = torch.empty(_PERIOD, dtype=torch.uint8)

    def fill(self, tensor: torch.Tensor, start: int, stop: int, *, bucket: int, iteration: int) -> None:
        """Write bytes [start, stop) of a flat tensor."""
        target = tensor.view(torch.uint8)
        for first in range(start, stop, _PERIOD):
            last = min(first + _PERIOD, stop)
            self._expected(first, last, bucket, iteration, target[first:last])

    def fill_numbers(self, tensor: torch.Tensor, *, bucket: int, iteration: int) -> None:
        """Write small whole numbers, which every type has, so that sums with zeros are exact."""
        numbers = torch.empty(tensor.numel(), dtype=torch.int8)
        self.fill(numbers, 0, tensor.numel(), bucket=bucket, iteration=iteration)
        tensor.copy_(numbers)

    def equal(self, tensor: torch.Tensor, *, bucket: int, iteration: int) -> bool:
        """Return whether a whole flat tensor has the contents of `iteration`."""
        actual = tensor.view(torch.uint8)
        for first in range(0, len(actual), _PERIOD):
            last = min(first + _PERIOD, len(actual))
            expected = self._scratch[: last - first]
            self._expected(first, last, bucket, iteration, expected)
            if not torch.equal(actual[first:last], expected):
                return False
        return True

    def _expected(self, first: int, last: int, bucket: int, iteration: int, out: torch.Tensor) -> None:
        word = f"{self._seed} {bucket} {iteration}".encode()
        digest = hashlib.blake2b(word, digest_size=5).digest()
        begin = (int.from_bytes(digest[:4], "big") + first) % _PERIOD
        torch.bitwise_xor(self._noise[begin : begin + last - first], digest[4], out=out)


DType = Literal["float32", "float64", "float16", "bfloat16", "int32", "int8"]
Operation = Literal["allgather", "allreduce"]
_STEPS = {"allgather": allgather_steps, "allreduce": allreduce_steps}


class BucketSpec(StrictModel):
    """A bucket: its number of elements, their type, and its shadow id."""

    elements: Whole
    dtype: DType = "float32"
    shadow_id: Annotated[int, Field(ge=0, le=0xFFFF)] = 0


class RingJob(StrictModel):
    """Configuration of all ranks of a ring.

    Without `digest`, for benchmarks, it does not hash; without `tag` no tagger. `group` is the DP group's
    index in the job. `pause` is the time between two AllGathers in seconds, in place of computation. `tails`
    are for shadow nodes that join mid-stream. With `tree_bytes`, an AllReduce has smaller buckets go over
    trees, whose boundaries are those of group `tree_group`.
    """

    ips: Annotated[list[str], Field(min_length=2)]
    buckets: Annotated[list[BucketSpec], Field(min_length=1)]
    channels: Annotated[int, Field(ge=1, le=wire.CHANNELS_MAX)] = 1
    operation: Operation = "allgather"
    iterations: Annotated[int, Field(ge=1)]
    seed: int = 0
    incarnation: Annotated[int, Field(ge=0, le=255)] = 0
    group: Whole = 0
    dscp_bit: Annotated[int, Field(ge=1, le=32)] = wire.DEFAULT_DSCP_BIT
    port: Annotated[int, Field(ge=1, le=65535 - wire.CHANNELS_MAX)] = DEFAULT_PORT
    ports: tuple[int, ...] = ()
    tree_bytes: Whole | None = None
    tree_group: Whole = 0
    tree_ports: tuple[int, ...] = ()
    tag: bool = True
    digest: bool = True
    verify: Literal["each", "last", "none"] = "each"
    pause: Annotated[float, Field(ge=0)] = 0
    tails: tuple[Tail, ...] = ()
    slice_bytes: Annotated[int, Field(ge=8, multiple_of=8)] = SLICE_BYTES
    timeout: Annotated[float, Field(gt=0)] = 60

    @model_validator(mode="after")
    def _can_be_reduced(self) -> RingJob:
        if self.tree_bytes is not None and self.operation != "allreduce":
            raise ValueError('trees reduce; set operation to "allreduce"')
        if self.operation == "allreduce" and any("float" not in spec.dtype for spec in self.buckets):
            raise ValueError("an allreduce averages, so its buckets must have floating-point types")
        return self


class RankResult(StrictModel):
    """A rank's final report. `seconds` has the time of each iteration's AllGather, from a barrier on."""

    rank: int
    iterations: int
    bytes_per_iteration: int
    verified: int
    seconds: list[float]
    sent_bytes: int
    goodput_bits_per_second: float
    retransmitted_segments: int
    faults: dict[str, int]
    streams: list[TaggedStream]


def run_rank(job: RingJob, rank: int) -> RankResult:
    """Run one rank to the end; raise `RingError`, `TaggerUnavailable` or `TimeoutError` on failure."""
    if not 0 <= rank < len(job.ips):
        raise RingError(f"rank {rank} is not in a ring of {len(job.ips)}")
    tensors = [torch.zeros(spec.elements, dtype=getattr(torch, spec.dtype)) for spec in job.buckets]
    buckets = [
        Bucket(spec.elements, tensor.element_size(), spec.shadow_id)
        for spec, tensor in zip(job.buckets, tensors, strict=True)
    ]
    side = side_of(len(job.ips), rank)
    tagging = job.tag and side is not None
    digests = Digests(side or 0, job.digest, job.tails)
    slicing = None if job.tree_bytes is None else TreeSlicing(job.tree_bytes)
    if side is not None and job.tag:
        hops = [(job.group, 0)] if slicing is None else [(job.group, 0), (job.tree_group, job.channels)]
        for group, first_channel in hops:
            for channel in range(first_channel, first_channel + job.channels):
                for shadow_id in sorted({bucket.shadow_id for bucket in buckets}):
                    digests.expect(2 * group + side, channel, shadow_id)
    with ExitStack() as stack:
        tagger = stack.enter_context(Tagger.attach()) if tagging else None
        ring = stack.enter_context(connect_ring(_place(job, rank), tagger, job.timeout))
        connections: list[Connections] = [ring]
        small = [slicing is not None and slicing.by_tree(bucket) for bucket in buckets]
        over_ring = [index for index, is_small in enumerate(small) if not is_small]
        collectives: list[tuple[Collective, list[int]]] = []
        if over_ring:
            parts = [buckets[index] for index in over_ring]
            gather = AllGather(ring, parts, job.slice_bytes, _STEPS[job.operation])
            collectives.append((stack.enter_context(gather), over_ring))
        if slicing is not None:
            tree = stack.enter_context(connect_tree(_tree_place(job, rank), tagger, job.timeout))
            connections.append(tree)
            over_trees = [index for index, is_small in enumerate(small) if is_small]
            if over_trees:
                averaging = _averaging(tree, [buckets[index] for index in over_trees])
                collectives.append((stack.enter_context(averaging), over_trees))
        seconds = _iterate(job, ring, collectives, buckets, tensors, digests)
        for connection in connections:
            connection.drain(job.timeout)
        ring.barrier()  # no rank leaves before all are complete
        per_channel = (
            sender_bytes(job, [buckets[index] for index in over_ring], rank, channel)
            for channel in range(job.channels)
        )
        tree_bytes = sum(bucket.nbytes for bucket, is_small in zip(buckets, small, strict=True) if is_small)
        sent_bytes = (sum(per_channel) + _sent_on_trees(len(job.ips), rank, tree_bytes)) * job.iterations
        return RankResult(
            rank=rank,
            iterations=job.iterations,
            bytes_per_iteration=sum(bucket.nbytes for bucket in buckets),
            verified={"each": job.iterations, "last": 1, "none": 0}[job.verify],
            seconds=seconds,
            sent_bytes=sent_bytes,
            goodput_bits_per_second=8 * sent_bytes / sum(seconds),
            retransmitted_segments=sum(connection.retransmitted() for connection in connections),
            faults=tagger.faults() if tagger else {},
            streams=digests.results(),
        )


def _iterate(
    job: RingJob,
    ring: Ring,
    collectives: Sequence[tuple[Collective, Sequence[int]]],
    buckets: Sequence[Bucket],
    tensors: Sequence[torch.Tensor],
    digests: Digests,
) -> list[float]:
    """Run all iterations of collectives, each on the buckets of these numbers; return their seconds."""
    contents = Contents(job.seed)
    durations = []
    for iteration in range(job.iterations):
        if job.operation == "allreduce":
            _fill_one(contents, ring.place, tensors, iteration)
        else:
            _fill_own(contents, ring.place, buckets, tensors, iteration)
        time.sleep(job.pause)
        digests.begin(iteration)
        ring.barrier()
        start = time.perf_counter()
        for collective, numbers in collectives:
            collective.run([tensors[number] for number in numbers], digests.take if job.tag else None)
        durations.append(time.perf_counter() - start)
        digests.hash_taken()
        if job.verify == "each" or (job.verify == "last" and iteration == job.iterations - 1):
            _verify(job, contents, ring.place.rank, tensors, iteration)
    return durations


def _fill_one(contents: Contents, place: RingPlace, tensors: Sequence[torch.Tensor], iteration: int) -> None:
    """Fill each tensor with zeros on all ranks but one, so that every rank knows the average."""
    for index, tensor in enumerate(tensors):
        if place.rank == (index + iteration) % place.ranks:
            contents.fill_numbers(tensor, bucket=index, iteration=iteration)
        else:
            tensor.zero_()


def _fill_own(
    contents: Contents,
    place: RingPlace,
    buckets: Sequence[Bucket],
    tensors: Sequence[torch.Tensor],
    iteration: int,
) -> None:
    """Fill this rank's own chunks; all others still have the last iteration's contents."""
    chunk = chunk_sent(place.ranks, place.rank, 0)
    for index, (bucket, tensor) in enumerate(zip(buckets, tensors, strict=True)):
        for channel in range(place.channels):
            where = chunk_slice(bucket.elements, place.channels, channel, place.ranks, chunk)
            start, stop = where.start * bucket.itemsize, where.stop * bucket.itemsize
            contents.fill(tensor, start, stop, bucket=index, iteration=iteration)


def _verify(
    job: RingJob, contents: Contents, rank: int, tensors: Sequence[torch.Tensor], iteration: int
) -> None:
    for index, tensor in enumerate(tensors):
        if job.operation == "allreduce":
            average = torch.empty_like(tensor)
            contents.fill_numbers(average, bucket=index, iteration=iteration)
            is_right = torch.equal(tensor, average.div_(len(job.ips)))
        else:
            is_right = contents.equal(tensor, bucket=index, iteration=iteration)
        if not is_right:
            raise RingError(f"rank {rank}: iteration {iteration}: bucket {index} has wrong contents")


def sender_bytes(job: RingJob, buckets: Sequence[Bucket], rank: int, channel: int) -> int:
    """Return the number of bytes that a rank sends on a channel in one iteration."""
    at = Position(rank, len(job.ips), channel, job.channels)
    steps = [_STEPS[job.operation](bucket, at, job.slice_bytes) for bucket in buckets]
    return sum(send.stop - send.start for step_list in steps for send in step_list.sends)


def _averaging(tree: Tree, buckets: Sequence[Bucket]) -> Collective:
    """Return an AllReduce over trees."""
    return Collective(
        len(buckets),
        lambda on_done, on_error: TreeEngine(tree, buckets, on_done, on_error, divisor=tree.place.ranks),
    )


def _sent_on_trees(ranks: int, rank: int, nbytes: int) -> int:
    """Return how much a rank sends of that many bytes: half of them on each link of a tree."""
    sides = [links(tree_place(ranks, rank, side)) for side in SIDES]
    return sum(nbytes // 2 for side in sides for link in side if link.way.sends)


def _tree_place(job: RingJob, rank: int) -> RingPlace:
    place = _place(job, rank)
    fingerprint = hashlib.blake2b(b"trees " + place.fingerprint, digest_size=16).digest()
    return replace(place, port=TREE_PORT, ports=job.tree_ports, fingerprint=fingerprint)


def _place(job: RingJob, rank: int) -> RingPlace:
    common = job.model_dump_json(include={"buckets", "channels", "ips", "iterations", "seed"})
    return RingPlace(
        rank,
        job.ips,
        job.channels,
        port=job.port,
        ports=job.ports,
        incarnation=job.incarnation,
        dscp_bit=job.dscp_bit,
        fingerprint=hashlib.blake2b(common.encode(), digest_size=16).digest(),
    )


def main() -> int:
    """Return 0 if everything was gathered and checked, 1 if not, 2 for an invalid configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m topologies.traffic.rank",
        description=__doc__,
        epilog="example: python -m topologies.traffic.rank --config ring.json --rank 0 --result r0.json",
    )
    parser.add_argument("--config", required=True, type=Path, help="the job, as JSON (see RingJob)")
    parser.add_argument("--rank", required=True, type=int, help="this rank, from 0")
    parser.add_argument(
        "--result", type=Path, help="where to write the result as JSON; default: standard output"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a lab's ranks share one machine
    try:
        rank_result = run_rank(read_config(arguments.config, RingJob), arguments.rank)
        result = rank_result.model_dump_json(indent=1) + "\n"
        if arguments.result:
            arguments.result.write_text(result)
        else:
            sys.stdout.write(result)
    except BadDescription as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (RingError, TaggerError, OSError) as error:
        print(error if isinstance(error, RingError) else f"rank {arguments.rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
