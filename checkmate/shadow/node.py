"""A shadow node: the owner of the node's lock and threads.

Reader threads fill buckets, one thread steps, one reports the passage of time to the state, and gRPC's
threads run the functions in `calls`. All of them change `node_state.NodeState` in the same way: by `moving`,
which holds the lock `changed`. No thread steps, receives or uses the network while it holds that lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from checkmate.events.kinds import NODE_STALLED, STREAM_BROKEN, Happened
from checkmate.events.saying import say
from checkmate.job.schema import Job
from checkmate.keys.access import Access
from checkmate.keys.roles import Secret
from checkmate.nodes.other_ranks import job_ranks
from checkmate.output.log_lines import GatheredLog, first_and_count, left_out_words
from checkmate.shadow import locks, memory
from checkmate.shadow.clock import STALL, AwakeClock, Silence
from checkmate.shadow.hold import Hold
from checkmate.shadow.logic.effects import Close, Connect, Due, Effect, Empty, Join, Log, Release
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.logic.node_state import NodeState
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.connector import Connector, Reader
from checkmate.shadow.receive.inlet import Inlet
from checkmate.shadow.receive.plans import hold_plans

log = logging.getLogger("checkmate")

GRACE = 2.0
"""Seconds that a stream may stay below its recorded end before the rest counts as lost."""
TICK = 0.1

Seeds = Mapping[int, tuple[torch.Tensor, Mapping[str, object]]]
"""Tensor and optimizer state of parameters, by number."""

_PAUSE = 1.0  # seconds, after an unexpected error


class Node:
    """One shadow node of a job. Its threads run between `start` and `close`."""

    def __init__(
        self,
        job: Job,
        node_id: int,
        access: Access,
        *,
        receive_buffer: int = RECEIVE_BUFFER,
        grace: float = GRACE,
        threads: int | None = None,
    ) -> None:
        self.job, self.id, self.access = job, node_id, access
        self.job_ranks = job_ranks(job)
        self.plans = hold_plans(job, node_id)
        self.nics = [str(nic.ip) for nic in job.node(node_id).nics]
        self.changed = threading.Condition(locks.ordered_lock("node"))
        self._clock = AwakeClock()
        self._silence = Silence()
        self.state = NodeState(job, node_id, self.now(), receive_buffer=receive_buffer, grace=grace)
        self.data: dict[HoldState, Hold] = {}
        """The tensors and sockets of each hold of `state`."""
        self.step_seconds = 0.0
        self.waiting_fetches = 0
        """Calls that wait for an iteration to be stepped."""
        self.stopping = False
        self.also_unread: list[Callable[[], int]] = []
        """Functions that count bytes waiting for other readers."""
        self.trainers: Callable[[], int] = lambda: 0
        """Returns the number of connections for step records."""
        self._stepping = False
        self._torch_threads = threads
        self._breaks = GatheredLog(
            logging.WARNING, first_and_count, lambda lines: STREAM_BROKEN(count=len(lines), why=lines[0])
        )
        self.readers = [Reader(f"nic {ip}", self.touch, self._broken) for ip in self.nics]
        self._connector = Connector(
            self.readers, self.nics, receive_buffer, access.secret(Secret.HELLO), self.touch
        )
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("steps", self._step_forever), ("watch", self._watch_forever))
        ]

    def start(self) -> None:
        """Start to step, and to detect missing data."""
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        """Return the state's time: seconds, without those in which this process was stopped."""
        return self._clock.now()

    @contextmanager
    def moving(self) -> Iterator[NodeState]:
        """Hold the lock while the caller changes the state; then carry out the effects."""
        with self.changed:
            yield self.state
            self._follow_up()

    def touch(self) -> None:
        """Update the state after streams have received data."""
        with self.moving():
            pass

    def holds(self) -> list[Hold]:
        """Return all holds, by group."""
        with self.changed:
            return [self.data[hold] for _, hold in self.state.holds]

    def unread(self) -> int:
        """Return the number of bytes that this machine has received and this process could read."""
        with self.changed:
            inlets = [inlet for hold in self.data.values() for inlet in hold.inlets if not inlet.paused]
        return sum(inlet.queued() for inlet in inlets) + sum(count() for count in self.also_unread)

    def silent_since(self, *, unread: bool = False) -> float:
        """Return when this node last received or stepped something, or had something `unread`.

        The caller holds the lock.
        """
        records = [group.records.count for group in self.state.groups.values()]
        steps = [hold.released for _, hold in self.state.holds]
        received = [reader.bytes for reader in self.readers]
        return self._silence.since((*received, *records, *steps), self.now(), unread=unread)

    def wait_for(self, known: Callable[[], bool], timeout: float) -> bool:
        """Wait until `known` returns true. The caller holds the lock."""
        return self.changed.wait_for(lambda: known() or self.stopping, timeout) and known()

    def wait_for_fetch(self, known: Callable[[], bool], timeout: float) -> None:
        """Wait like `wait_for`, counted among `waiting_fetches`. The caller holds the lock."""
        self.waiting_fetches += 1
        try:
            self.wait_for(known, timeout)
        finally:
            self.waiting_fetches -= 1

    def quiet(self, timeout: float) -> bool:
        """Wait until no step is running. The caller holds the lock and prevents new steps."""
        return self.changed.wait_for(lambda: not self._stepping, timeout)

    def step(self, due: Due) -> None:
        """Step one hold. Do nothing if it has rejoined in the meantime."""
        with self.changed:
            hold = self.data.get(due.hold)
            step = None if hold is None else self.state.begin_step(due)
        if hold is None or step is None:
            return
        try:
            result = hold.step(due.iteration, step)
        except Exception as error:
            left_out = hold.state.failures.again(due.iteration)
            if left_out is not None:
                words = left_out_words(left_out)
                log.exception("%s: stepping iteration %d failed%s", hold, due.iteration, words)
            snapshot = hold.snapshot()
            with self.moving() as state:
                state.step_failed(due, error, snapshot)
            return
        with self.moving() as state:
            state.stepped(due, step, result, self.now())

    def load(self, hold: HoldState, iteration: int, parameters: Seeds) -> list[int]:
        """Load parameters in their state after `iteration`. Return late ones, whose next gradients are gone.

        Does nothing if the hold is live or settled: the seeds are duplicates, or belong to an earlier start.
        Raises `ReplicaError` if one does not fit.
        """
        with self.changed:
            data = self.data.get(hold)
            if data is None or not self.state.begin_load(hold):
                return []
        try:
            return data.load(iteration, ((n, *values) for n, values in parameters.items()))
        finally:
            snapshot = data.snapshot()
            with self.moving() as state:
                state.end_load(hold, snapshot)

    def close(self) -> None:
        """End all threads and close all sockets."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        self._connector.stop()
        self._breaks.flush()
        for hold in self.holds():
            hold.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for reader in self.readers:
            reader.stop()

    def _follow_up(self) -> None:
        for hold in self.data.values():
            hold.look()
        self.state.refresh(self.now())
        for effect in self.state.take_effects():
            self._carry_out(effect)
        self.changed.notify_all()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect(state):
                self._connect(self.data[state])
            case Join(state):
                self.data[state].join()
                self._connect(self.data[state])
            case Empty(state):
                self.data[state].empty()
            case Close(state):
                self.data.pop(state).close()
            case Release(iteration):
                for hold in self.data.values():
                    hold.replica.release(iteration)
            case Log(level, message, None):
                log.log(level, "%s", message)
            case Log(level, message, Happened() as event):
                say(level, event, "%s", message)

    def _connect(self, hold: Hold) -> None:
        """Connect a hold's streams in the background."""
        for reader in self.readers:
            reader.wake()  # to close sockets of closed inlets
        incarnation = self.state.groups[hold.state.plan.group].begin.incarnation
        for inlet in hold.inlets:
            self._connector.connect(inlet, incarnation)

    def _broken(self, inlet: Inlet) -> None:
        """Reconnect a stream at its position; data sent in the meantime shows as a gap."""
        self._breaks.add(f"{inlet.plan}: {inlet.broken}; reconnecting")
        with self.changed:
            group = self.state.groups.get(inlet.plan.group)
            if group is not None and not inlet.closed:
                self._connector.connect(inlet, group.begin.incarnation, again=True)

    def _step_forever(self) -> None:
        if self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        self._forever("stepping", self._step_due)

    def _watch_forever(self) -> None:
        self._forever("watching", self._tick)

    def _forever(self, what: str, turn: Callable[[], None]) -> None:
        while not self.stopping:
            try:
                turn()
            except Exception as error:  # our own bug; a node without this thread would look alive
                log.exception("%s", what)
                with self.changed:
                    if what == "stepping":
                        self._stepping = False
                    self.state.tell(f"{what} failed: {error!r}")
                    self.changed.wait_for(lambda: self.stopping, _PAUSE)

    def _tick(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.stopping, TICK)
            if stopped := self._clock.beat():
                seconds = STALL + stopped
                event = NODE_STALLED(seconds=round(seconds, 3))
                say(logging.WARNING, event, "this process did not run for %.1f s, and continues", seconds)
            if not self.stopping:
                self.silent_since()
                self.state.tick(self.now())
                self._follow_up()

    def _step_due(self) -> None:
        """Wait until steps are due, and do them."""
        with self.changed:
            while not (due := self.state.due(self.now())) and not self.stopping:
                self.changed.wait()
            if self.stopping:
                return
            self._stepping = True
            stepped = [self.data[one.hold] for one in due]
        start = time.monotonic()
        for one in due:
            self.step(one)
        self.step_seconds = time.monotonic() - start
        if [hold for hold in stepped if hold.take_loaded()]:
            memory.trim()
        with self.moving() as state:
            state.tally.count_steps(self.step_seconds)
            self._stepping = False
            state.forget()
        for reader in self.readers:
            reader.wake()
