"""A shadow node: the one owner of its lock and its threads.

Reader threads fill buckets, one thread steps, one tells the state that time has passed, and gRPC's threads
call `starting`, `restarting`, `seeding` and `reading`. All of them move `node_state.NodeState` in the same
way: under the lock `changed`, by `moving`. Nobody steps, receives or talks to the network under it (`locks`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from checkmate.job.schema import Job
from checkmate.shadow import memory
from checkmate.shadow.clock import AwakeClock
from checkmate.shadow.hold import Hold
from checkmate.shadow.locks import OrderedLock
from checkmate.shadow.logic.effects import Close, Connect, Effect, Empty, Join, Log, Release
from checkmate.shadow.logic.hold_state import HoldState
from checkmate.shadow.logic.node_state import Due, NodeState
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.connector import Connector
from checkmate.shadow.receive.inlet import Inlet
from checkmate.shadow.receive.plans import hold_plans
from checkmate.shadow.receive.reader import Reader

log = logging.getLogger("checkmate")

GRACE = 2.0
"""Seconds for which a stream may stand below its recorded end before the rest is lost."""
TICK = 0.1

Seeds = Mapping[int, tuple[torch.Tensor, Mapping[str, object]]]
"""Parameters by number: the tensor, and the optimizer's state of it."""

_PAUSE = 1.0  # seconds, after what should not happen


class Node:
    """One shadow node of a job. `start` starts its threads, `close` ends them."""

    def __init__(
        self,
        job: Job,
        node_id: int,
        *,
        receive_buffer: int = RECEIVE_BUFFER,
        grace: float = GRACE,
        threads: int | None = None,
    ) -> None:
        self.job, self.id = job, node_id
        self.plans = hold_plans(job, node_id)
        self.nics = [str(nic.ip) for nic in job.node(node_id).nics]
        self.changed = threading.Condition(OrderedLock("node"))  # type: ignore[arg-type]
        self._clock = AwakeClock()
        self.state = NodeState(job, node_id, self.now(), receive_buffer=receive_buffer, grace=grace)
        self.data: dict[HoldState, Hold] = {}
        """The tensors and sockets of each hold of `state`."""
        self.step_seconds = 0.0
        self.stopping = False
        self.also_unread: list[Callable[[], int]] = []
        """Count bytes that wait for other readers than ours."""
        self._stepping = False
        self._torch_threads = threads
        self.readers = [Reader(f"nic {ip}", self.touch, self._broken) for ip in self.nics]
        self._connector = Connector(self.readers, self.nics, receive_buffer, self.touch)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("steps", self._step_forever), ("watch", self._watch_forever))
        ]

    def start(self) -> None:
        """Step, and look for what does not come, from now on."""
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        """Return the time by which the state lives: seconds in which this process was not stopped."""
        return self._clock.now()

    @contextmanager
    def moving(self) -> Iterator[NodeState]:
        """Hold the lock while something happens to the state; then see what follows from it, and do that."""
        with self.changed:
            yield self.state
            self._follow_up()

    def touch(self) -> None:
        """See what streams have brought."""
        with self.moving():
            pass

    def holds(self) -> list[Hold]:
        """All holds, by group."""
        with self.changed:
            return [self.data[hold] for _, hold in self.state.holds]

    def unread(self) -> int:
        """Return how many bytes this machine has received that can be read, and have not been."""
        with self.changed:
            inlets = [inlet for hold in self.data.values() for inlet in hold.inlets if not inlet.paused]
        return sum(inlet.queued() for inlet in inlets) + sum(count() for count in self.also_unread)

    def wait_for(self, known: Callable[[], bool], timeout: float) -> bool:
        """Wait until something is so; the caller has the lock."""
        return self.changed.wait_for(lambda: known() or self.stopping, timeout) and known()

    def quiet(self, timeout: float) -> bool:
        """Wait until no step is under way. The caller has the lock, and has seen to it that none starts."""
        return self.changed.wait_for(lambda: not self._stepping, timeout)

    def step(self, due: Due) -> None:
        """Step one hold; nothing happens if it has joined again meanwhile."""
        with self.changed:
            hold = self.data.get(due.hold)
            step = None if hold is None else self.state.begin_step(due)
        if hold is None or step is None:
            return
        try:
            result = hold.step(due.iteration, step)
        except Exception as error:
            log.exception("%s: iteration %d can't be stepped", hold, due.iteration)
            snapshot = hold.snapshot()
            with self.moving() as state:
                state.step_failed(due, error, snapshot)
            return
        with self.moving() as state:
            state.stepped(due, step, result, self.now())

    def load(self, hold: HoldState, iteration: int, parameters: Seeds) -> list[int]:
        """Give a hold parameters as they are after `iteration`; return those whose next gradients are gone.

        Nothing happens if it is live or settled: these are duplicates, or of a start that is over.
        `ReplicaError` if one doesn't fit.
        """
        with self.changed:
            data = self.data.get(hold)
            if data is None or hold.live or hold.settled:
                return []
            hold.loading += 1
        try:
            return data.load(iteration, ((n, *values) for n, values in parameters.items()))
        finally:
            snapshot = data.snapshot()
            with self.moving():
                hold.loading -= 1
                hold.took(snapshot)

    def close(self) -> None:
        """End all threads, close all sockets."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        self._connector.stop()
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
            case Connect(state, incarnation):
                self._connect(self.data[state], incarnation)
            case Join(state, incarnation):
                self.data[state].join()
                self._connect(self.data[state], incarnation)
            case Empty(state):
                self.data[state].empty()
            case Close(state):
                self.data.pop(state).close()
            case Release(iteration):
                for hold in self.data.values():
                    hold.replica.release(iteration)
            case Log(level, message):
                log.log(level, "%s", message)

    def _connect(self, hold: Hold, incarnation: int) -> None:
        """Connect a hold's streams, in the background."""
        for reader in self.readers:
            reader.wake()  # to close what was closed
        for inlet in hold.inlets:
            self._connector.connect(inlet, incarnation)

    def _broken(self, inlet: Inlet) -> None:
        """A connection broke: it goes on where it stood, and a gap shows if something was sent meanwhile."""
        log.warning("%s: %s; connecting again", inlet.plan, inlet.broken)
        with self.changed:
            group = self.state.groups.get(inlet.plan.group)
            if group is not None and not inlet.closed:
                self._connector.connect_again(inlet, group.begin.incarnation)

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
            except Exception as error:  # our own fault; a thread that ended would look alive
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
                log.warning("this process was stopped for %.1f s; it goes on with what has come", stopped)
            if not self.stopping:
                self.state.tick(self.now())
                self._follow_up()

    def _step_due(self) -> None:
        """Wait until holds are due, and step them."""
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
            self._stepping = False
            state.forget()
        for reader in self.readers:
            reader.wake()
