"""A hold: one shard of one DP group, with its replica, its streams and its two sets of buckets.

A hold joins at some iteration: from there on it receives everything. It is seeded, in one go or parameter by
parameter, steps what it has, and is live once all its parameters are at the same iteration (design, *Loss*).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from checkmate.layout import Layout
from checkmate.rpc import shadow_pb2 as pb
from checkmate.schedule import StreamLayout, stream_layout
from checkmate.shadow.buckets import SETS, BucketSets
from checkmate.shadow.doubt import Doubt
from checkmate.shadow.inlet import Inlet
from checkmate.shadow.records import Records
from checkmate.shadow.replica import Replica
from checkmate.shadow.streams import FARTHEST, HoldPlan, ahead_at_most, check_lengths

log = logging.getLogger("checkmate")

AHEAD = 3
"""A hold joins so many iterations ahead of the trainers, so that it is connected in time."""

HURRY = 2.0
"""Where socket buffers last for fewer seconds than this, nothing waits in them for another shard."""

RECORD_GRACES = 5
"""A record that newer ones have overtaken is given up after so many times the grace of a stream."""


class Hold:
    """One shard of one group. The node's lock covers it, but for `lock`, which covers replica and buckets."""

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
    ) -> None:
        self.plan, self.layout, self.replica, self.first = plan, layout, replica, first
        self.parameters = layout.of_shard(plan.shard)
        self.layouts: dict[tuple[int, int], StreamLayout] = {
            (s.side, s.channel): stream_layout(
                layout.schedule, channels, s.channel, ranks, side=s.side, shadow_id=plan.shard
            )
            for s in plan.streams
        }
        check_lengths(list(self.layouts.values()))
        self.lock = threading.Lock()
        self.live = False
        self.doubt = Doubt(replica.comparison)
        self.settled = False
        self.trouble = ""
        self.ahead = AHEAD
        self.asked = 0.0  # when trainers were last asked for seeds
        self.from_holder = False  # another holder gives the seeds
        self.lagging = 0.0  # when it was last no more than one iteration behind
        self.lag_said = False
        self.stepping: int | None = None  # an iteration whose record is not kept yet
        self.last: int | None = None  # the iteration after which none follows
        self.joined = joined
        self.sets = BucketSets(layout, plan.shard, joined - 1)
        self.in_full = joined - 1
        self.inlets = self._new_inlets()
        self._record_since = 0.0
        self._loaded = False

    def __str__(self) -> str:
        return f"DP group {self.plan.group}, shard {self.plan.shard}"

    @property
    def released(self) -> int:
        """The last iteration whose gradients are used up."""
        return self.sets.released

    @property
    def seeded(self) -> bool:
        """Whether all its parameters are at the same iteration."""
        return not self.parameters or self.replica.iteration is not None

    @property
    def stepped(self) -> int:
        """The iteration after whose step its state is; -1 where there is no one such."""
        if not self.parameters:
            return self.released
        return -1 if self.replica.iteration is None else self.replica.iteration

    @property
    def receiving(self) -> int:
        """The newest iteration of which a byte has come; -1 none."""
        return max((i.receiving for i in self.inlets if i.receiving is not None), default=-1)

    @property
    def doubtful(self) -> bool:
        """Whether comparing has found it wrong, and not right since."""
        return self.doubt.active

    @property
    def holds_something(self) -> bool:
        """Whether a restart can't simply begin anew."""
        return bool(self.replica.at) or self.joined > 0 or self.receiving >= 0

    @property
    def wants_seeds(self) -> bool:
        """Whether parameters are to be asked for: an iteration has come whole, so connecting has worked."""
        return not (self.live or self.settled) and self.in_full >= self.joined and bool(self.wanted())

    def go_live(self) -> None:
        """From now on it counts for commits."""
        self.live, self.ahead, self.trouble = True, AHEAD, self.trouble if self.doubtful else ""
        self.lagging = time.monotonic()
        log.info("%s: live at iteration %d", self, self.stepped)

    def join(self, iteration: int) -> None:
        """Take everything from this iteration on; what was received before is dropped."""
        for inlet in self.inlets:
            inlet.close()
        if self.seeded:
            self.doubt.stood(self.stepped)
        with self.lock:
            self.live = self.from_holder = self.lag_said = False
            self.asked = 0.0
            self.joined = iteration
            self.sets.released = self.in_full = iteration - 1
            self.inlets = self._new_inlets()
            self._record_since = 0.0

    def empty(self) -> None:
        """Its state is worth nothing: it is seeded anew."""
        with self.lock:
            self.live = False
            self.replica.clear()

    def joinable(self, newest: int) -> int:
        """The iteration at which to join, where `newest` is the newest that trainers are known to be in."""
        return newest + min(self.ahead, ahead_at_most(list(self.layouts.values())))

    def update(self, records: Records) -> None:
        """See which iterations have come in full."""
        whole = [inlet.whole for inlet in self.inlets if inlet.whole is not None]
        while records.complete(self.in_full + 1) and all(last > self.in_full for last in whole):
            self.in_full += 1

    def may_go_live(self, committed: int) -> bool:
        """Whether it can count: all connected, all parameters stepped through what the job has committed."""
        return (
            not self.live
            and not self.settled
            and self.seeded
            and self.stepped == self.released
            and self.released >= committed
            and all(inlet.connected for inlet in self.inlets)
        )

    def due(self, committed: int, *, alone: bool) -> int | None:
        """The iteration to step now, if any. `alone`: no node is live, so nothing is committed.

        While parameters are still to come, a step waits until the set of buckets is needed: they then have
        all the time that two iterations take.
        """
        iteration = self.released + 1
        if self.settled or iteration > self.in_full:
            return None
        if self.live:
            return iteration if iteration <= committed else None
        if iteration > committed and not alone:
            return None
        hurry = iteration < self.in_full or iteration < committed or not self.wanted()
        return iteration if hurry else None

    def pressed(self, patience: float, receive_buffer: int) -> bool:
        """Whether there is no room for long: both sets are full, and socket buffers fill up too."""
        if self.in_full < self.released + SETS:
            return False
        return patience < HURRY or any(inlet.queued() > receive_buffer // 4 for inlet in self.inlets)

    def step(self, iteration: int, step: pb.Step) -> list[str]:
        """Step what is at the iteration before, and release the buckets; what comparing found wrong."""
        with self.lock:
            if iteration != self.released + 1 or iteration > self.in_full:
                return []  # it has joined anew meanwhile
            troubles = []
            if self.parameters:
                troubles = self.replica.step(iteration, self.sets.gradients(iteration), step)
            self.sets.released = iteration
            return troubles

    def load(
        self, iteration: int, seeds: Iterable[tuple[int, torch.Tensor, Mapping[str, object]]]
    ) -> list[int]:
        """Take parameters as they are after `iteration`; the late ones, whose next gradients are gone."""
        late: list[int] = []
        with self.lock:
            if self.live or self.settled:
                return late  # duplicates, or of a start that is over
            for number, tensor, values in seeds:
                if self.replica.at.get(number, iteration - 1) >= max(iteration, self.released):
                    continue  # it has come before
                if iteration < self.released:
                    late.append(number)
                else:
                    self.replica.load(number, tensor, values, iteration)
                    self._loaded = True
        return late

    def take_loaded(self) -> bool:
        """Whether parameters were loaded since this was last asked."""
        loaded, self._loaded = self._loaded, False
        return loaded

    def wanted(self) -> list[int]:
        """The parameters that must be seeded: not there, or their next gradients are gone."""
        at, released = self.replica.at, self.released
        return [number for number in self.parameters if at.get(number, released - 1) < released]

    def gap(self, records: Records, now: float, grace: float) -> str | None:
        """What is lost for good, if anything is."""
        for inlet in self.inlets:
            plan = inlet.plan
            begun = max(records.newest, self.receiving) >= self.joined > self.first
            if begun and not (inlet.received or inlet.connected):
                return f"{plan}: not connected before iteration {self.joined}"
            end = records.ends.get((plan.side, plan.channel, plan.shard), 0)
            lost = end - inlet.position >= FARTHEST  # connecting again wouldn't bring it
            if lost or inlet.stands_below(end, now) > grace:
                return f"{plan}: {end - inlet.position} bytes have not come"
        following = self.in_full + 1
        if now - records.missing.get(following, now) > grace:
            return f"a rank passed over its record of iteration {following}"
        if records.newest <= following or records.complete(following):
            self._record_since = now
        elif now - (self._record_since or now) > RECORD_GRACES * grace:
            return f"the record of iteration {following} has not come"
        return None

    def settle(self) -> None:
        """Drop streams and gradients; the state stays, to be read."""
        for inlet in self.inlets:
            inlet.close()
        with self.lock:
            self.settled = True
            self.sets.tensors = [{} for _ in range(SETS)]
        self.inlets = []

    def close(self) -> None:
        """Nothing more is received."""
        for inlet in self.inlets:
            inlet.close()

    def read(
        self, iteration: int, parameters: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor, Mapping[str, object]]]:
        """The state after an iteration that is stepped; of all parameters where none is named."""
        return iter(self.replica.read(iteration, tuple(parameters))) if self.parameters else iter(())

    def _new_inlets(self) -> list[Inlet]:
        return [
            Inlet(
                plan,
                self.layouts[plan.side, plan.channel],
                self.sets,
                first=self.first,
                joined=self.joined,
            )
            for plan in self.plan.streams
        ]
