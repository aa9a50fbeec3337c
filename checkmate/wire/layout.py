"""The layout: the place of each parameter's gradient in buckets and shards.

Pure, and the same on both sides (design, section 7). It depends only on the parameters, the number of shards
and the size of buckets; neither DDP's own buckets nor a restart change it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from checkmate.base.wording import counted
from checkmate.wire.nccl_slicing import KIND as NCCL_KIND
from checkmate.wire.nccl_slicing import NcclSlicing
from checkmate.wire.parameter import (
    ITEMSIZES,
    STATE_ITEMSIZES,
    LayoutError,
    Parameter,
    described,
    numbers,
    parameter_of,
)
from checkmate.wire.parts import PartSlicing
from checkmate.wire.schedule import RING_SLICING, Bucket, Slicing
from checkmate.wire.shares import WHOLE, Share, owners
from checkmate.wire.tree import KIND as TREE_KIND
from checkmate.wire.tree import TreeSlicing

BUCKET_BYTES: Final = 25 * 1024 * 1024
"""Size at which a bucket is closed, as in DDP (`bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """The place of parameter number `parameter` in a bucket: elements [start, stop), in memory order."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket: whole gradients of one type and one shard, one after another."""

    shard: int
    dtype: str
    places: tuple[BucketPlace, ...]
    owner: int | None = None
    """The position of the only rank that has it; `None` if all have it."""

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.places[-1].stop


@dataclass(frozen=True)
class Layout:
    """Parameters in registration order, and buckets in the order of the ring.

    With a `share`, the buckets are those of the share's parameters alone. All shares number the parameters of
    the whole model.
    """

    parameters: tuple[Parameter, ...]
    shards: int
    bucket_bytes: int
    buckets: tuple[BucketLayout, ...]
    slicing: Slicing = RING_SLICING
    frozen: tuple[Parameter, ...] = ()
    """Chunks of parameters that training does not reduce, which are in no bucket."""
    share: Share = WHOLE

    @cached_property
    def schedule(self) -> tuple[Bucket, ...]:
        """The buckets in the form that the ring's schedule and `stream_layout` use."""
        return tuple(
            Bucket(bucket.elements, STATE_ITEMSIZES[bucket.dtype], bucket.shard, bucket.owner)
            for bucket in self.buckets
        )

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters themselves, which come before the optimizer state that is copied."""
        return tuple(parameter for parameter in self.parameters if not parameter.state)

    @cached_property
    def where(self) -> dict[int, tuple[int, BucketPlace]]:
        """Each parameter's bucket and place."""
        return {p.parameter: (i, p) for i, bucket in enumerate(self.buckets) for p in bucket.places}

    @cached_property
    def empty(self) -> tuple[int, ...]:
        """The first share's parameters without elements: in no bucket, but they may have optimizer state."""
        if self.share.index:
            return ()
        return tuple(number for number, parameter in enumerate(self.parameters) if not parameter.elements)

    @cached_property
    def own_numbers(self) -> frozenset[int]:
        """The parameters of the share."""
        return frozenset([*self.where, *self.empty])

    def of_shard(self, shard: int) -> list[int]:
        """Return a shard's parameters, in their order in its buckets. The first shard has empty ones, too."""
        placed = [place.parameter for b in self.buckets if b.shard == shard for place in b.places]
        return [*placed, *self.empty] if shard == self.buckets[0].shard else placed

    def to_json(self) -> str:
        """Return a description from which the other side builds the same layout."""
        parameters = [described(parameter) for parameter in self.parameters]
        description: dict[str, Any] = {
            "parameters": parameters,
            "shards": self.shards,
            "bucket_bytes": self.bucket_bytes,
        }
        if self.slicing != RING_SLICING:  # layouts from before there was another one have no name of it
            description["slicing"] = dict(self.slicing.describe())
        if self.frozen:
            description["frozen"] = [described(parameter) for parameter in self.frozen]
        if self.share != WHOLE:
            description["share"] = [self.share.index, self.share.count]
        return json.dumps(description, sort_keys=True)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that identify the layout."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).digest()


def from_json(text: str) -> Layout:
    """Return the layout that `Layout.to_json` describes. Raise `LayoutError` if the text is invalid."""
    try:
        document = json.loads(text)
        parameters = [parameter_of(p) for p in document["parameters"]]
        shards, bucket_bytes = numbers([document["shards"], document["bucket_bytes"]])
        frozen = [parameter_of(p) for p in document.get("frozen", [])]
        index, count = numbers(document.get("share", [0, 1]))
        share, slicing = Share(index, count), _slicing(document.get("slicing"))
        return make_layout(parameters, shards, bucket_bytes, slicing, frozen, share)
    except KeyError as error:
        raise LayoutError(f"not a layout: it lacks {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise LayoutError(f"not a layout: {error}") from None


def _slicing(document: Any) -> Slicing:
    """Return the slicing of a description, which is the ring's if it names none.

    Raise `TypeError` or `ValueError` if it is none that is known here.
    """
    if document is None:
        return RING_SLICING
    if document == PartSlicing().describe():
        return PartSlicing()
    kinds: dict[str, type[NcclSlicing | TreeSlicing]] = {NCCL_KIND: NcclSlicing, TREE_KIND: TreeSlicing}
    kind = kinds.get(str(document.get("kind"))) if isinstance(document, dict) else None
    if kind is None:
        raise ValueError(f"its slicing is none that this version of Checkmate knows: {str(document)[:80]}")
    parameters = {name: value for name, value in document.items() if name != "kind"}
    names = [field.name for field in fields(kind)]
    if sorted(parameters) != sorted(names) or not all(type(value) is int for value in parameters.values()):
        raise TypeError(f"the parameters of its slicing must be {', '.join(names)}, each a number")
    return kind(**parameters)


def make_layout(
    parameters: Sequence[Parameter],
    shards: int,
    bucket_bytes: int = BUCKET_BYTES,
    slicing: Slicing = RING_SLICING,
    frozen: Sequence[Parameter] = (),
    share: Share = WHOLE,
) -> Layout:
    """Lay out a model's trained parameters, or a share of them.

    They are taken in reverse order, in which backward completes their gradients, cut into shards of similar
    size, and each shard into buckets.

    Args:
        parameters: the parameters, in registration order.
        shards: the number of shards.
        bucket_bytes: size at which a bucket is closed.
        slicing: how the AllReduce cuts buckets.
        frozen: chunks of parameters that are not reduced.
        share: the share that is laid out.

    Returns:
        The layout, whose buckets are without empty parameters.

    Raises:
        LayoutError: if all parameters are empty, or fewer than shares, or one has an unsupported type.
    """
    for parameter in parameters:
        types, subject = (STATE_ITEMSIZES, "copied state") if parameter.state else (ITEMSIZES, "gradients")
        for dtype in (parameter.dtype, parameter.gradient_dtype):
            if dtype not in types:
                raise LayoutError(f"{parameter.name} has type {dtype}; {subject} may be {', '.join(types)}")
        dimensions = range(len(parameter.shape))
        if parameter.dim_order and sorted(parameter.dim_order) != [*dimensions]:
            raise LayoutError(f"{parameter.name} has dimensions {[*dimensions]}, not {parameter.dim_order}")
    for parameter in (*parameters, *frozen):
        if (parameter.whole or parameter.offset) and not _is_chunk(parameter):
            raise LayoutError(
                f"{parameter.name}, {parameter.shape} at {parameter.offset}, is not within {parameter.whole}"
            )
    if shards < 1 or bucket_bytes < 1:
        raise LayoutError(f"{shards} shards with buckets of {bucket_bytes} bytes; each must be at least 1")
    order = _order(parameters, share)
    buckets: list[BucketLayout] = []
    for shard, run in _runs(order, parameters, shards).items():
        buckets += _buckets(run, parameters, shard, bucket_bytes)
    return Layout(tuple(parameters), shards, bucket_bytes, tuple(buckets), slicing, tuple(frozen), share)


def _order(parameters: Sequence[Parameter], share: Share) -> list[int]:
    """Return a share's parameters that have elements, in the order in which backward completes gradients."""
    filled = [i for i, parameter in enumerate(parameters) if parameter.elements]
    if not filled:
        raise LayoutError("no parameter needs a gradient")
    if not share.index < share.count <= len(filled):
        raise LayoutError(
            f"share {share.index} of {share.count} of a model of {counted(len(filled), 'parameter')}: each "
            "share needs a parameter, so use as many ranks of a host as there are parameters, or fewer"
        )
    owned = owners([parameters[i].nbytes for i in filled], share.count)
    return [i for i, owner in zip(reversed(filled), reversed(owned), strict=True) if owner == share.index]


def _is_chunk(parameter: Parameter) -> bool:
    """Return whether a chunk lies within its whole parameter."""
    numbers = parameter.offset, parameter.shape, parameter.whole
    if len({len(column) for column in numbers}) > 1:
        return False
    return all(start + size <= whole for start, size, whole in zip(*numbers, strict=True))


def _runs(order: Sequence[int], parameters: Sequence[Parameter], shards: int) -> dict[int, list[int]]:
    """Cut `order` into runs, by shard; without empty ones, because a description may claim 2^48 shards.

    A parameter belongs to the shard of its middle byte.
    """
    total = sum(parameters[i].nbytes for i in order)
    runs: dict[int, list[int]] = {}
    before = 0
    for i in order:
        nbytes = parameters[i].nbytes
        runs.setdefault((2 * before + nbytes) * shards // (2 * total), []).append(i)
        before += nbytes
    return runs


def _buckets(
    run: Sequence[int], parameters: Sequence[Parameter], shard: int, bucket_bytes: int
) -> Iterator[BucketLayout]:
    """Yield a shard's buckets, one per type and owner at a time: full ones first, the rest as opened."""
    open_: dict[tuple[str, tuple[int, ...]], list[BucketPlace]] = {}
    for i in run:
        dtype, owner = kind = parameters[i].gradient_dtype, parameters[i].owner
        places = open_.setdefault(kind, [])
        start = places[-1].stop if places else 0
        places.append(BucketPlace(i, start, start + parameters[i].elements))
        if places[-1].stop * STATE_ITEMSIZES[dtype] >= bucket_bytes:
            yield BucketLayout(shard, dtype, tuple(open_.pop(kind)), *owner)
    for (dtype, owner), places in open_.items():
        yield BucketLayout(shard, dtype, tuple(places), *owner)
