"""Creates a rank's tagger, ring, reducer and the front of its gradients, on all ranks together."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from checkmate.job.mesh import group_name
from checkmate.keys.access import access
from checkmate.keys.roles import Role, Secret
from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingPlace, RingTimeout, host_ports, repair_ports, ring_ports, tree_ports
from checkmate.tagger import Tagger, TaggerUnavailable
from checkmate.training.errors import SessionError
from checkmate.training.gradients.buckets import GradientBuckets, GradientFront
from checkmate.training.gradients.ddp_hook import GradientHook, resumed_reduction
from checkmate.training.gradients.host_reducer import HostReducer, HostRings, merge
from checkmate.training.gradients.reducer import Reducer
from checkmate.training.gradients.repairs import Repairs
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.training.model.ddp import DdpModel
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.copied_state import CopiedState
from checkmate.training.start import exchange
from checkmate.training.start.places import Place, Start
from checkmate.training.start.survivor import Survivor
from checkmate.tree.connections import Tree, connect_tree
from checkmate.wire.layout import Layout
from checkmate.wire.schedule import StreamName


def make_reducer(
    place: Place,
    layouts: Mapping[int, Layout],
    start: Start,
    devices: Collection[torch.device],
    undo: ExitStack,
    *,
    required: bool,
    average: bool,
) -> tuple[Reducer, list[str]]:
    """Return what reduces gradients, and why it does not tag them. All ranks call it.

    Args:
        place: This rank's place.
        layouts: The layouts of the DP groups that train the model, by group.
        start: The start of training.
        devices: The devices that have gradients.
        undo: Closes what the reducer uses.
        required: Whether it is an error if NCCL's sends can't be tagged. Our ring always tags.
        average: Whether gradients are averaged; else they are summed.

    Raises:
        SessionError: NCCL's sends can't be tagged, and that is required.
        Others: As `connect`.
    """
    layout = layouts[place.group]
    if place.job.collective != "nccl":
        pinned = any(device.type == "cuda" for device in devices)
        ring, tree, repairs = connect(place, layout, start, undo)
        divisor = place.replicas if average else 1
        reducer = RingReducer(
            *(ring, layout, tree),
            first_id=place.first_id,
            pinned=pinned,
            divisor=divisor,
            repairs=repairs,
        )
        if not place.together:
            return reducer, []
        rings = undo.enter_context(HostRings(host_place(place, layouts, start)))
        return HostReducer(
            merge(list(layouts.values())), place.share.index, reducer, rings, pinned=pinned
        ), []
    from checkmate.training.gradients.nccl_setup import NcclMaker  # noqa: PLC0415 - other jobs have none

    (device,) = devices
    maker = NcclMaker(place, layout, start, device, undo, required, average)
    return maker.make(), maker.troubles


def make_front(
    model: TrainedModel,
    place: Place,
    layouts: Mapping[int, Layout],
    start: Start,
    devices: Collection[torch.device],
    undo: ExitStack,
    *,
    required: bool,
    copied: CopiedState | None = None,
) -> tuple[GradientFront, list[str]]:
    """Return what has a model's gradients copied, and why it does not tag them. All ranks call it.

    `copied`: the state that is copied in place of gradients. Other args and errors: as in `make_reducer`.
    """
    if place.job.copies == "host":
        from checkmate.training.gradients.part_copies import PartCopies, StateCopies, StepFront  # noqa: PLC0415

        layout = layouts[place.group]
        _check_same_layouts(place, layout)
        if copied is None:
            copies = PartCopies(place, layout, start, list(model.trained().values()))
        else:
            copies = StateCopies(place, layout, start, copied)
        resumed = None
        if isinstance(model, DdpModel):
            resumed = resumed_reduction(model.ddp, start.next_iteration)
        return StepFront(model.outer, copies, resumed), []
    reducer, untagged = make_reducer(
        place, layouts, start, devices, undo, required=required, average=model.averages
    )
    return reducing_front(model, reducer, start.next_iteration), untagged


def _check_same_layouts(place: Place, layout: Layout) -> None:
    """Raise `SessionError` on all ranks if ranks of a DP group do not train the same part of a model."""
    prints = exchange.gather(layout.fingerprint.hex(), name_of=place.name_of)
    for number, group in enumerate(place.job.dp_groups):
        first, *rest = (member.rank for member in group.ranks)
        for rank in rest:
            if prints[rank] != prints[first]:
                raise SessionError(
                    f"{place.name_of(first)} and {place.name_of(rank)} are in one DP group "
                    f"({group_name(place.job, number)}), but train other parameters, or other parts of them: "
                    "the job file's mesh must be that of all of the model's parameters"
                )


def reducing_front(model: TrainedModel, reducer: Reducer, first_iteration: int) -> GradientFront:
    """Return what has a model's gradients reduced by a reducer of ours."""
    buckets = GradientBuckets(reducer.layout, list(model.trained().values()), reducer, first_iteration)
    if isinstance(model, DdpModel):
        return GradientHook(model.ddp, buckets)
    from checkmate.training.gradients.fsdp_hooks import ShardedHooks  # noqa: PLC0415 - imports FSDP
    from checkmate.training.model.fsdp import FsdpReplica  # noqa: PLC0415

    assert isinstance(model, FsdpReplica)
    return ShardedHooks(model, buckets)


def host_place(place: Place, layouts: Mapping[int, Layout], start: Start) -> RingPlace:
    """Return this rank's place among those of its host that train its model. Nothing there is tagged."""
    ranks = place.host_ranks
    common = b"".join(layout.fingerprint for layout in layouts.values())
    return RingPlace(
        place.share.index,
        [str(rank.ip) for rank in ranks],
        1,
        incarnation=start.plan.incarnation,
        fingerprint=_fingerprint(common, start, f"within {ranks[0].host}"),
        ports=host_ports(place.job, ranks),
        names=[rank.named for rank in ranks],
        key=access(place.job, Role.TRAINER).secret(Secret.RING),
    )


def _fingerprint(layout: bytes, start: Start, more: str) -> bytes:
    """Return what ranks of a ring must have in common, in 16 bytes."""
    common = layout + f"{start.plan.run} {start.next_iteration}{more}".encode()
    return hashlib.blake2b(common, digest_size=16).digest()


def connect(
    place: Place, layout: Layout, start: Start, undo: ExitStack
) -> tuple[Ring, Tree | None, Repairs | None]:
    """Connect ring and trees, with a tagger on boundary ranks, and what repairs copies, if they may be lost.

    `undo` closes the connections.

    Raises:
        KeysError: The keys of role trainer are missing or can't be used.
        TaggerUnavailable: On all ranks, if one of them can't tag.
        RingError: The ring or the trees could not be connected.
    """
    group = f" {place.group}" if place.job.hosts else ""  # its ranks' addresses may be those of others
    where = RingPlace(
        place.position,
        place.ips,
        place.job.channels,
        incarnation=start.plan.incarnation,
        dscp_bit=place.job.tag.dscp_bit,
        fingerprint=_fingerprint(layout.fingerprint, start, group),
        ports=ring_ports(place.job, place.group),
        device=place.interface,
        names=place.names,
        key=access(place.job, Role.TRAINER).secret(Secret.RING),
    )
    tagger, trouble = None, None
    if place.side is not None:
        try:
            tagger = undo.enter_context(Tagger.attach(stays=Survivor.is_wanted))
        except TaggerUnavailable as error:
            trouble = (f"{place.name}: {error.missing}", error.remedy)
    troubles = [trouble for trouble in exchange.gather(trouble, name_of=place.name_of) if trouble is not None]
    if troubles:
        missing, remedy = troubles[0]
        raise TaggerUnavailable(str(missing), str(remedy))
    try:
        ring = undo.enter_context(connect_ring(where, tagger))
        tree = None
        if place.job.has_trees(place.group):
            again = replace(
                where,
                fingerprint=_fingerprint(layout.fingerprint, start, f" {place.group}, trees"),
                ports=tree_ports(place.job, place.group),
            )
            tree = undo.enter_context(connect_tree(again, tagger))
        repairs = None if place.job.lossless else _connect_repairs(where, place, layout, start, tagger, undo)
    except RingTimeout as error:
        raise RingTimeout(
            f"{error}. Do all ranks run, and has `checkmate run` installed the job on its switches? "
            "`checkmate status JOB` shows that"
        ) from error
    Tagger.give_up_capabilities()  # also on ranks that do not tag: all hosts have the same starter
    return ring, tree, repairs


def _connect_repairs(
    where: RingPlace, place: Place, layout: Layout, start: Start, tagger: Tagger | None, undo: ExitStack
) -> Repairs:
    """Connect a ring with one channel, between the same addresses, for what is sent again."""
    again = replace(
        where,
        channels=1,
        fingerprint=_fingerprint(layout.fingerprint, start, f" {place.group}, repairs"),
        ports=repair_ports(place.job, place.group),
    )
    ring = undo.enter_context(connect_ring(again, tagger))
    nbytes = {}
    if place.side is not None:
        for channel in range(place.job.channels):
            for shard in sorted({bucket.shard for bucket in layout.buckets}):
                name = StreamName(place.position, channel, shard)
                laid = layout.slicing.stream(layout.schedule, name, place.job.channels, place.ranks)
                nbytes[channel, shard] = laid.nbytes
    repairs = Repairs(ring, nbytes, start.next_iteration, place.first_id)
    undo.callback(repairs.close)
    return repairs
