"""The resources of a hold: the replica, two sets of buckets, and the receiving ends of the streams.

`logic.hold` has its state and decisions; this module writes tensors and reads sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import locks
from checkmate.shadow.logic.hold import Hold, HoldSnapshot, Stepped, StreamState
from checkmate.shadow.logic.repair import StreamRepair
from checkmate.shadow.receive.hold_plans import HoldPlan, TaggedStreamPlan, check_lengths
from checkmate.shadow.receive.inlet import BucketSets, Inlet
from checkmate.shadow.receive.part_streams import new_inlet
from checkmate.shadow.replica.replica import Replica
from checkmate.wire.layout import Layout
from checkmate.wire.repair import digest_of


class HoldResources:
    """The tensors and sockets of one hold. `lock` covers replica and buckets."""

    def __init__(
        self,
        plan: HoldPlan,
        layout: Layout,
        replica: Replica,
        *,
        channels: int,
        ranks: int,
        first: int,
        joined: int,
        repairs: bool = False,
    ) -> None:
        """Create the hold and its resources, without seeds.

        Args:
            first: the iteration at byte 0 of the streams.
            joined: the first iteration that it receives.
            repairs: whether lost bytes of the streams are asked of the ranks again.

        Raises:
            StreamTooLong: if an iteration of a stream is too long.
        """
        self.layout, self.replica = layout, replica
        self.lock = locks.ordered_lock("hold")
        layouts = [
            layout.slicing.stream(layout.schedule, stream.name, channels, ranks) for stream in plan.streams
        ]
        check_lengths(layouts)
        # A switch has its streams connected, whatever they carry; a rank has none without bytes.
        streams = [
            StreamState(stream, laid, repair=StreamRepair() if repairs else None)
            for stream, laid in zip(plan.streams, layouts, strict=True)
            if laid.nbytes or isinstance(stream, TaggedStreamPlan)
        ]
        self.hold = Hold(plan, layout.of_shard(plan.shard), streams, first, joined)
        self.sets = BucketSets(layout, plan.shard, joined - 1, len(streams))
        self.inlets = self._new_inlets()
        self._left_out, self._left_out_until = 0, 0  # iterations counted so far, and the first that is not
        self._version = 0
        self._loaded = False
        self.hold.update_at(HoldSnapshot(0, dict(replica.at)))
        self.observe()

    def __str__(self) -> str:
        return str(self.hold)

    def observe(self) -> None:
        """Copy the positions of the streams to the hold."""
        if self.hold.settled:
            return
        for inlet, stream in zip(self.inlets, self.hold.streams, strict=False):
            paused = inlet.paused
            stream.observe(
                inlet.position,
                inlet.received_bytes,
                connected=inlet.connected,
                paused=paused,
                queued=inlet.queued() if paused else 0,
                lost=inlet.lost,
                waited=inlet.waited,
                period=inlet.period,
            )

    def step(self, iteration: int, step: pb.Step) -> Stepped:
        """Step parameters that are at the previous iteration, release the buckets, and compare.

        Raises `ReplicaError` if the record or the gradients do not fit.
        """
        with self.lock:
            troubles = self.replica.step(iteration, self.sets.gradients(iteration), step)
            self.sets.release(iteration)
            comparison = self.replica.comparison
            equal = min(comparison.doubtful.values(), default=iteration - 1)
            return Stepped(self._snapshot(), troubles, equal, comparison.to_messages())

    def load(
        self, iteration: int, seeds: Iterable[tuple[int, torch.Tensor, Mapping[str, object]]]
    ) -> list[int]:
        """Load parameters in their state after `iteration`. Return those whose next gradients are gone."""
        late: list[int] = []
        with self.lock:
            released = self.sets.released
            for number, tensor, values in seeds:
                if self.replica.at.get(number, iteration - 1) >= max(iteration, released):
                    continue  # a duplicate
                if iteration < released:
                    late.append(number)
                else:
                    self.replica.load(number, tensor, values, iteration)
                    self._loaded = True
        return late

    def digest(self, sender: int, repaired: pb.RepairedRange) -> bytes:
        """Return the digest of received bytes of a stream, none of which a step has used."""
        for inlet in self.inlets:
            if inlet.plan.name == (sender, repaired.channel, repaired.shard):
                with suppress(KeyError):  # a restart has just settled it, and discarded its buckets
                    return digest_of(inlet.received(repaired.start, repaired.stop))
        return b""

    def snapshot(self) -> HoldSnapshot:
        """Return each seeded parameter's iteration."""
        with self.lock:
            return self._snapshot()

    def take_loaded(self) -> bool:
        """Return whether parameters were loaded since the last call."""
        loaded, self._loaded = self._loaded, False
        return loaded

    def empty(self) -> None:
        """Discard parameters and optimizer state."""
        with self.lock:
            self.replica.clear()
            self.hold.update_at(self._snapshot())

    def count_left_out(self) -> int:
        """Return how many iterations ranks have left out, because this node took too little."""
        for left_out in sorted((inlet.left_out for inlet in self.inlets if inlet.left_out), key=min):
            self._left_out += max(left_out.stop - max(left_out.start, self._left_out_until), 0)
            self._left_out_until = max(self._left_out_until, left_out.stop)
        return self._left_out

    def join(self) -> None:
        """Discard all received gradients, and receive from iteration `Hold.joined` on."""
        self.count_left_out()
        for inlet in self.inlets:
            if not inlet.rejoin(self.hold.joined):
                inlet.close()
        with self.lock:
            self.sets.release(self.hold.joined - 1)
            connected = {number: inlet for number, inlet in enumerate(self.inlets) if not inlet.closed}
            self.inlets = [connected.get(number, inlet) for number, inlet in enumerate(self._new_inlets())]
        self.observe()

    def settle(self) -> None:
        """Discard streams and gradients; keep parameters and optimizer state for readers."""
        self.close()
        self.count_left_out()
        with self.lock:
            self.sets.clear()
        self.inlets = []

    def close(self) -> None:
        """Stop receiving."""
        for inlet in self.inlets:
            inlet.close()

    def _snapshot(self) -> HoldSnapshot:
        self._version += 1
        return HoldSnapshot(self._version, dict(self.replica.at))

    def _new_inlets(self) -> list[Inlet]:
        hold = self.hold
        return [
            new_inlet(stream.plan, stream.layout, self.sets, first=hold.first, joined=hold.joined)
            for stream in hold.streams
        ]
