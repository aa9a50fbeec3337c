"""The layout: where each parameter's gradient stands, in which bucket of which shard. Fixed for good.

Pure, and the same on both sides (design, section 7): it follows from the parameters, the number of shards and
the buckets' size alone, and neither DDP's own buckets nor a restart change it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final

from checkmate.wire.schedule import Bucket

BUCKET_BYTES: Final = 25 * 1024 * 1024
"""A bucket is closed once it has this much, as DDP's are (`bucket_cap_mb`)."""

ITEMSIZES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Types that a gradient may have, by their name in torch, and an element's bytes."""


class LayoutError(ValueError):
    """Parameters that can't be laid out."""


def dim_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the innermost; empty if that is row-major.

    Dimensions of size 1 come first: equal memory gives equal orders. `LayoutError` if elements overlap or
    have gaps between them.
    """
    if 0 in shape:
        return ()
    wide = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    nearer = 1
    for dimension in reversed(wide):
        if strides[dimension] != nearer:
            said = f"shape {tuple(shape)}, strides {tuple(strides)}"
            raise LayoutError(f"its elements overlap or have gaps between them: {said}")
        nearer *= shape[dimension]
    if wide == sorted(wide):
        return ()
    return (*(d for d in range(len(shape)) if shape[d] == 1), *wide)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that training reduces: its name in the model (without DDP's prefix), shape and type.

    Its gradient, and all that a shadow node holds of it, stands in memory order: as the contiguous tensor
    `parameter.permute(dim_order)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim_order: tuple[int, ...] = ()
    """Its dimensions from the outermost in memory to the innermost; empty: row-major."""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Parameter:
        """The parameter that lies in memory so. `LayoutError` if it isn't dense."""
        try:
            return cls(name, tuple(shape), dtype, dim_order(shape, strides))
        except LayoutError as error:
            raise LayoutError(f"{name} can't be protected: {error}; make it contiguous()") from None

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of the contiguous tensor that it is in memory."""
        return tuple(self.shape[d] for d in self.dim_order) if self.dim_order else self.shape

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.elements * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Elements [start, stop) of a bucket are parameter number `parameter`, flat, in memory order."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket: whole parameters of one type and one shard, one after another."""

    shard: int
    dtype: str
    places: tuple[BucketPlace, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.places[-1].stop

    @property
    def bucket(self) -> Bucket:
        """The same for the ring's schedule."""
        return Bucket(self.elements, ITEMSIZES[self.dtype], self.shard)


@dataclass(frozen=True)
class Layout:
    """Parameters in registration order, and the buckets in the order in which the ring takes them."""

    parameters: tuple[Parameter, ...]
    shards: int
    bucket_bytes: int
    buckets: tuple[BucketLayout, ...]

    @cached_property
    def schedule(self) -> tuple[Bucket, ...]:
        """The buckets as the ring's schedule and `stream_layout` take them."""
        return tuple(bucket.bucket for bucket in self.buckets)

    @cached_property
    def where(self) -> dict[int, tuple[int, BucketPlace]]:
        """Each parameter's bucket and place."""
        return {p.parameter: (i, p) for i, bucket in enumerate(self.buckets) for p in bucket.places}

    @cached_property
    def empty(self) -> tuple[int, ...]:
        """Parameters without elements: they stand in no bucket, but may have optimizer state."""
        return tuple(number for number, known in enumerate(self.parameters) if not known.elements)

    def of_shard(self, shard: int) -> list[int]:
        """The parameters of a shard, in their order in its buckets; the first bucket's has empty ones too."""
        placed = [place.parameter for b in self.buckets if b.shard == shard for place in b.places]
        return [*placed, *self.empty] if shard == self.buckets[0].shard else placed

    def to_json(self) -> str:
        """What the other side makes the same layout from."""
        parameters = [asdict(parameter) for parameter in self.parameters]
        said = {"parameters": parameters, "shards": self.shards, "bucket_bytes": self.bucket_bytes}
        return json.dumps(said, sort_keys=True)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that tell layouts apart."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).digest()


def from_json(text: str) -> Layout:
    """The layout that `Layout.to_json` describes; `LayoutError` where it describes none."""
    try:
        said = json.loads(text)
        parameters = [
            Parameter(p["name"], tuple(p["shape"]), p["dtype"], tuple(p["dim_order"]))
            for p in said["parameters"]
        ]
        return make_layout(parameters, int(said["shards"]), int(said["bucket_bytes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"no layout: {error}") from None


def make_layout(parameters: Sequence[Parameter], shards: int, bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """Lay out a model's trained parameters, given in registration order.

    They are taken in reverse, as backward makes their gradients ready; cut into `shards` runs balanced by
    bytes; and each run into buckets. Empty ones stand in no bucket. `LayoutError` where there are no others,
    or one has a type that gradients can't have.
    """
    for parameter in parameters:
        if parameter.dtype not in ITEMSIZES:
            types = ", ".join(ITEMSIZES)
            raise LayoutError(f"{parameter.name} has type {parameter.dtype}; gradients may be {types}")
        dimensions = range(len(parameter.shape))
        if parameter.dim_order and sorted(parameter.dim_order) != [*dimensions]:
            raise LayoutError(
                f"{parameter.name} has no dimensions {parameter.dim_order}, but {[*dimensions]}"
            )
    if shards < 1 or bucket_bytes < 1:
        raise LayoutError(f"{shards} shards with buckets of {bucket_bytes} bytes; each is 1 or more")
    order = [i for i in reversed(range(len(parameters))) if parameters[i].elements]
    if not order:
        raise LayoutError("no parameter needs a gradient")
    buckets: list[BucketLayout] = []
    for shard, run in enumerate(_runs(order, parameters, shards)):
        buckets += _buckets(run, parameters, shard, bucket_bytes)
    return Layout(tuple(parameters), shards, bucket_bytes, tuple(buckets))


def _runs(order: Sequence[int], parameters: Sequence[Parameter], shards: int) -> Iterator[list[int]]:
    """`order` cut into `shards` runs: a parameter belongs to the shard in which its middle byte stands."""
    total = sum(parameters[i].nbytes for i in order)
    runs: list[list[int]] = [[] for _ in range(shards)]
    before = 0
    for i in order:
        nbytes = parameters[i].nbytes
        runs[(2 * before + nbytes) * shards // (2 * total)].append(i)
        before += nbytes
    return iter(runs)


def _buckets(
    run: Sequence[int], parameters: Sequence[Parameter], shard: int, bucket_bytes: int
) -> Iterator[BucketLayout]:
    """A shard's buckets: one open for each type; a full one is closed, the rest in the order of opening."""
    open_: dict[str, list[BucketPlace]] = {}
    for i in run:
        dtype = parameters[i].dtype
        places = open_.setdefault(dtype, [])
        start = places[-1].stop if places else 0
        places.append(BucketPlace(i, start, start + parameters[i].elements))
        if places[-1].stop * ITEMSIZES[dtype] >= bucket_bytes:
            yield BucketLayout(shard, dtype, tuple(open_.pop(dtype)))
    for dtype, places in open_.items():
        yield BucketLayout(shard, dtype, tuple(places))
