"""A shadow node: the owner of the node's lock and threads.

Reader threads fill buckets, one thread steps, one reports the passage of time to the state, and gRPC's
threads run the functions in `calls`. All of them change `node_state.NodeState` in the same way: by `moving`,
which holds the lock `state_changed`. No thread steps, receives or uses the network while it holds that lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from checkmate.base.machine_memory import trim
from checkmate.events.kinds import NODE_STALLED, STREAM_BROKEN, Occurrence
from checkmate.events.process_log import say
from checkmate.job.schema import Job
from checkmate.keys.access import Access
from checkmate.keys.roles import Secret
from checkmate.nodes.other_ranks import difference, job_ranks
from checkmate.output.log_lines import GatheredLog, first_and_count, left_out_words
from checkmate.shadow import locks
from checkmate.shadow.clock import STALL, AwakeClock, Silence
from checkmate.shadow.logic.effects import Close, Connect, DueStep, Effect, Empty, Join, Log, Release
from checkmate.shadow.logic.hold import Hold
from checkmate.shadow.logic.node_state import NodeState
from checkmate.shadow.own_file import OwnJobFile
from checkmate.shadow.receive.connect import RECEIVE_BUFFER
from checkmate.shadow.receive.hold_plans import hold_plans
from checkmate.shadow.receive.inlet import Inlet
from checkmate.shadow.receive.stream_threads import Connector, MakeSource, StreamSource
from checkmate.shadow.resources import HoldResources
from checkmate.state import StateError

log = logging.getLogger("checkmate")

GRACE = 2.0
"""Seconds that a stream may stay below its recorded end before the rest counts as lost."""
TICK = 0.1

Seeds = Mapping[int, tuple[torch.Tensor, Mapping[str, object]]]
"""Tensor and optimizer state of parameters, by number."""

_QUIET_SECONDS = 10.0
"""The longest that a change of ranks waits for a step that runs."""
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
        make_source: MakeSource | None = None,
        file: OwnJobFile | None = None,
    ) -> None:
        """Create it.

        Args:
            job: The node's job.
            node_id: Its id in the job.
            access: Its keys.
            receive_buffer: Bytes of each stream's socket buffer.
            grace: Seconds until missing bytes of a stream count as lost.
            threads: Threads of a step; by default one per core.
            make_source: Where streams come from; by default the switches of the job.
            file: The job file, if the node may read it again.
        """
        self.job, self.id, self.access = job, node_id, access
        self.file = file
        self.job_ranks = job_ranks(job)
        self.plans = hold_plans(job, node_id)
        self.state_changed = threading.Condition(locks.ordered_lock("node"))
        self._clock = AwakeClock()
        self._silence = Silence()
        self.state = NodeState(job, node_id, self.now(), receive_buffer=receive_buffer, grace=grace)
        self.resources: dict[Hold, HoldResources] = {}
        """The tensors and sockets of each hold of `state`."""
        self.step_seconds = 0.0
        self.waiting_fetches = 0
        """Calls that wait for an iteration to be stepped."""
        self.stopping = False
        self.also_unread: list[Callable[[], int]] = []
        """Functions that count bytes waiting for other readers."""
        self.on_take_up: list[Callable[[Job], None]] = []
        """Functions that are called with a job file in which the ranks have changed."""
        self.trainers: Callable[[], int] = lambda: 0
        """Returns the number of connections for step records."""
        self._stepping = False
        self._torch_threads = threads
        self._breaks = GatheredLog(
            logging.WARNING, first_and_count, lambda lines: STREAM_BROKEN(count=len(lines), why=lines[0])
        )
        nics = [str(nic.ip) for nic in job.node(node_id).nics]
        from_switches = partial(Connector, nics, receive_buffer, access.secret(Secret.HELLO))
        self.source: StreamSource = (make_source or from_switches)(self.touch, self._broken)
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
    def moving(self, *, observe: bool = True) -> Iterator[NodeState]:
        """Hold the lock while the caller changes the state; then carry out the effects.

        `observe`: whether to look at what streams have received before, which takes time for each of them.
        """
        with self.state_changed:
            yield self.state
            self._follow_up(observe=observe)

    def take_up(self, job: Job) -> None:
        """Go on with a job file in which the ranks have changed."""
        plans = hold_plans(job, self.id)
        with self.moving() as state:
            self.quiet(_QUIET_SECONDS)
            if difference(job_ranks(job), self.job_ranks) is None:
                return  # another DP group's call of the same start came first
            self.job, self.job_ranks, self.plans = job, job_ranks(job), plans
            self.source.follow(job)
            state.take_up(job, self.now())
        for follow in self.on_take_up:
            follow(job)

    def touch(self) -> None:
        """Update the state after streams have received data."""
        with self.moving():
            pass

    def all_resources(self) -> list[HoldResources]:
        """Return the resources of all holds, by group."""
        with self.state_changed:
            return [self.resources[hold] for _, hold in self.state.holds]

    def unread(self) -> int:
        """Return the number of bytes that this machine has received and this process could read."""
        with self.state_changed:
            inlets = [i for resources in self.resources.values() for i in resources.inlets if not i.paused]
        return sum(inlet.queued() for inlet in inlets) + sum(count() for count in self.also_unread)

    def silent_since(self, *, unread: bool = False) -> float:
        """Return when this node last received or stepped something, or had something `unread`.

        The caller holds the lock.
        """
        records = [group.records.count for group in self.state.groups.values()]
        steps = [hold.released for _, hold in self.state.holds]
        nbytes = [reader.bytes for reader in self.source.readers]
        return self._silence.since((*nbytes, *records, *steps), self.now(), unread=unread)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition` returns true. The caller holds the lock."""
        return self.state_changed.wait_for(lambda: condition() or self.stopping, timeout) and condition()

    def wait_for_fetch(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait like `wait_for`, counted among `waiting_fetches`. The caller holds the lock."""
        self.waiting_fetches += 1
        try:
            self.wait_for(condition, timeout)
        finally:
            self.waiting_fetches -= 1

    def quiet(self, timeout: float) -> bool:
        """Wait until no step is running. The caller holds the lock and prevents new steps."""
        return self.state_changed.wait_for(lambda: not self._stepping, timeout)

    def step(self, due_step: DueStep) -> None:
        """Step one hold. Do nothing if it has rejoined in the meantime."""
        with self.state_changed:
            resources = self.resources.get(due_step.hold)
            step = None if resources is None else self.state.begin_step(due_step)
        if resources is None or step is None:
            return
        try:
            result = resources.step(due_step.iteration, step)
        except Exception as error:
            left_out = due_step.hold.failures.again(due_step.iteration)
            if left_out is not None:
                words = left_out_words(left_out)
                log.exception("%s: stepping iteration %d failed%s", due_step.hold, due_step.iteration, words)
            snapshot = resources.snapshot()
            with self.moving() as state:
                state.fail_step(due_step, error, snapshot)
            return
        with self.moving() as state:
            state.end_step(due_step, step, result, self.now())

    def load(self, hold: Hold, iteration: int, parameters: Seeds) -> list[int]:
        """Load parameters in their state after `iteration`. Return late ones, whose next gradients are gone.

        Does nothing if the hold is live or settled: the seeds are duplicates, or belong to an earlier start.
        Raises `ReplicaError` if one does not fit.
        """
        with self.state_changed:
            resources = self.resources.get(hold)
            if resources is None or not self.state.begin_load(hold):
                return []
        try:
            return resources.load(iteration, ((n, *values) for n, values in parameters.items()))
        finally:
            snapshot = resources.snapshot()
            with self.moving() as state:
                state.end_load(hold, snapshot)

    def run_beside(self, work: Callable[[], None], name: str) -> None:
        """Do something in a thread of its own. If it fails, holds ask trainers for what they lack."""

        def run() -> None:
            try:
                work()
            except (StateError, LookupError, RuntimeError) as error:
                if not self.stopping:
                    log.warning("%s: %s; trainers are asked for it", name, error)

        threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        """End all threads and close all sockets."""
        with self.state_changed:
            self.stopping = True
            self.state_changed.notify_all()
        self._breaks.flush()
        for resources in self.all_resources():
            resources.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.source.stop()

    def _follow_up(self, *, observe: bool = True) -> None:
        for resources in self.resources.values() if observe else ():
            resources.observe()
        self.state.refresh(self.now())
        for effect in self.state.take_effects():
            self._carry_out(effect)
        self.state_changed.notify_all()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect(hold):
                self._connect(hold)
            case Join(hold):
                self.resources[hold].join()
                self._connect(hold)
            case Empty(hold):
                self.resources[hold].empty()
            case Close(hold):
                self.resources.pop(hold).close()
            case Release(iteration):
                for resources in self.resources.values():
                    resources.replica.release(iteration)
            case Log(level, message, None):
                log.log(level, "%s", message)
            case Log(level, message, Occurrence() as event):
                say(level, event, "%s", message)

    def _connect(self, hold: Hold) -> None:
        """Connect a hold's streams in the background."""
        for reader in self.source.readers:
            reader.wake()  # to close sockets of closed inlets
        begin = self.state.groups[hold.plan.group].begin
        for inlet in self.resources[hold].inlets:
            self.source.connect(inlet, begin)

    def _broken(self, inlet: Inlet) -> None:
        """Reconnect a stream at its position; data sent in the meantime shows as a gap."""
        self._breaks.add(f"{inlet.plan}: {inlet.broken}; reconnecting")
        with self.state_changed:
            group = self.state.groups.get(inlet.plan.group)
            if group is not None and not inlet.closed:
                self.source.connect(inlet, group.begin, again=True)

    def _step_forever(self) -> None:
        if self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        self._forever("stepping", self._step_due)

    def _watch_forever(self) -> None:
        self._forever("watching", self._tick)

    def _forever(self, task: str, turn: Callable[[], None]) -> None:
        while not self.stopping:
            try:
                turn()
            except Exception as error:  # our own bug; a node without this thread would look alive
                log.exception("%s", task)
                with self.state_changed:
                    if task == "stepping":
                        self._stepping = False
                    self.state.tell(f"{task} failed: {error!r}")
                    self.state_changed.wait_for(lambda: self.stopping, _PAUSE)

    def _tick(self) -> None:
        with self.state_changed:
            self.state_changed.wait_for(lambda: self.stopping, TICK)
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
        with self.state_changed:
            while not (steps := self.state.due_steps(self.now())) and not self.stopping:
                self.state_changed.wait()
            if self.stopping:
                return
            self._stepping = True
            stepped = [self.resources[step.hold] for step in steps]
        start = time.monotonic()
        for step in steps:
            self.step(step)
        self.step_seconds = time.monotonic() - start
        if [resources for resources in stepped if resources.take_loaded()]:
            trim()
        with self.moving() as state:
            state.tally.count_steps(self.step_seconds)
            self._stepping = False
            state.forget()
        for reader in self.source.readers:
            reader.wake()
