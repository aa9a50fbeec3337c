"""Turns noted iterations into messages and passes them to the lines to shadow nodes, in the background."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from checkmate import state
from checkmate.events.kinds import TRAINER_FIRST
from checkmate.events.process_log import say, seconds_since
from checkmate.job.schema import ShadowNode
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import MESSAGE_BYTES
from checkmate.training.errors import RefusedError
from checkmate.training.record.capture import RecordDraft
from checkmate.training.record.windows import to_message

_log: Final = logging.getLogger("checkmate")
_POLL_SECONDS: Final = 0.001
_DEPARTED_POLL_SECONDS: Final = 0.0002
DEPARTURE_SECONDS: Final = 0.25
"""Seconds that a step waits for the record before it to leave this process."""


class RecordSink(Protocol):
    """A destination of records: a line to a node."""

    @property
    def node(self) -> ShadowNode:
        """The node."""

    def send(self, iteration: int, data: bytes) -> None:
        """Queue an iteration's serialized part."""

    def departed(self, iteration: int) -> bool:
        """Return whether it has left this process, or can't for now because the node is away."""
        ...


def to_part(author: pb.RecordPart, draft: RecordDraft) -> pb.RecordPart:
    """Return a rank's part of an iteration's record. Raise `StateError` if `extra` can't be stored.

    `author` has the fields that all parts of the rank share.
    """
    captured = draft.end
    part = pb.RecordPart(
        iteration=draft.iteration,
        rng=state.dump_generators(captured.rng),
        extra=b"" if captured.extra is None else state.dumps(captured.extra),
    )
    part.MergeFrom(author)
    part.beside = draft.beside
    if draft.buffers:
        part.buffers = state.dumps({name: later() for name, later in draft.buffers.items()})
    for (channel, shard), end in draft.ends.items():
        part.ends.add(channel=channel, shard=shard, end=end)
    if author.position == 0:
        _fill_step(part.step, draft)
    return part


def _fill_step(step: pb.Step, draft: RecordDraft) -> None:
    """Fill in the optimizer's step, in place: a message is copied when it is put into another."""
    captured = draft.end
    step.SetInParent()
    step.skipped, step.last = draft.skipped(), draft.last
    step.options.extend(draft.options)
    step.next_options.extend(captured.next_options)
    step.without_gradient.extend(sorted(draft.without_gradient))
    step.with_gradient.extend(draft.with_gradient)
    step.beginnings.extend(draft.beginnings)
    step.scheduler = b"" if captured.scheduler is None else state.dumps(captured.scheduler)
    step.scheduler_class = captured.scheduler_class
    step.scaler = b"" if captured.scaler is None else state.dumps(captured.scaler)
    step.slices.extend(to_message(window, later()) for window, later in draft.slices)
    for scaled in draft.scaled:
        step.scalings.add(
            kind=scaled.kind,
            factor=float(scaled.factor.item()),
            parameters=scaled.parameters,
            dtype=state.dtype_name(scaled.factor.dtype),
        )


HasPassed = Callable[[int, int, Mapping[tuple[int, int], int]], bool]
"""Returns whether nothing can keep a node from this rank's copies: node, iteration, ends of its streams."""
_PROGRESS_BYTES: Final = 64
"""At most, of what a part has for one node alone."""
MAX_HELD_BACK: Final = 64
"""Records that are held back for a node; beyond them, it gets the oldest without its copies."""


class _Record(NamedTuple):
    iteration: int
    ends: Mapping[tuple[int, int], int]
    data: bytes


class Publisher:
    """A thread that publishes iterations in order: to each node once nothing can keep copies from it."""

    def __init__(
        self,
        author: pb.RecordPart,
        sinks: Sequence[RecordSink],
        has_passed: HasPassed,
        repairs_from: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Start it.

        Args:
            author: The fields that all parts of the rank share.
            sinks: The lines to nodes.
            has_passed: As `CopiedGradients.has_passed` (`gradients.buckets`).
            repairs_from: Returns the oldest iteration that this rank can send again, if any.
        """
        self._repairs_from = repairs_from
        self._author = author
        self._sinks = sinks
        self._has_passed = has_passed
        self.error: Exception | None = None
        """The reason why an iteration could not be published, and no later one is."""
        self.failed_iteration = -1
        """That iteration."""
        self.newest = -1
        """The last iteration published; -1 before the first."""
        self._last_queued = -1
        self._began = time.monotonic()
        self._slow: list[RecordSink] = []  # nodes for which steps do not wait
        self._waited = dict.fromkeys((sink.node.id for sink in sinks), 0.0)  # seconds of steps, by node
        self._queue: queue.SimpleQueue[RecordDraft | None] = queue.SimpleQueue()
        self._held_back: dict[int, deque[_Record]] = {sink.node.id: deque() for sink in sinks}
        """Records, by node, whose copies are still on their way there."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def put(self, draft: RecordDraft) -> None:
        """Publish an iteration, without blocking."""
        self._last_queued = draft.iteration
        self._queue.put(draft)

    def await_departed(self) -> None:
        """Wait until all iterations put have left this process, so that its death does not lose any.

        If an iteration could not be published, raise the error. This blocks only if iterations take just a
        few milliseconds. For a node that does not accept records it waits `DEPARTURE_SECONDS` once.
        """
        if self.error is not None:
            raise self.error
        before = time.monotonic()
        deadline = before + DEPARTURE_SECONDS
        while self._behind(self._last_queued):
            if self._closing.is_set() or not self._thread.is_alive():
                break
            now = time.monotonic()
            for sink in self._sinks:
                if sink not in self._slow and not sink.departed(self._last_queued):
                    self._waited[sink.node.id] += now - before
            before = now
            if now > deadline:
                self._slow = [sink for sink in self._sinks if not sink.departed(self._last_queued)]
                return
            time.sleep(_DEPARTED_POLL_SECONDS)
        if self.error is not None:
            raise self.error

    def _behind(self, iteration: int) -> bool:
        """Return whether some node that accepts records has not been sent an iteration."""
        self._slow = [sink for sink in self._slow if not sink.departed(iteration)]
        swift = (sink for sink in self._sinks if sink not in self._slow)
        return self.newest != iteration or not all(sink.departed(iteration) for sink in swift)

    def close(self, timeout: float) -> None:
        """Publish queued iterations for up to `timeout` seconds, and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout)
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while (draft := self._next()) is not None:
            try:
                for check in draft.checks:
                    check()
                data = to_part(self._author, draft).SerializeToString()
                if len(data) > MESSAGE_BYTES - _PROGRESS_BYTES:
                    raise state.StateError(
                        f"the step record of iteration {draft.iteration} has {len(data) >> 20} MiB, but the "
                        f"limit is {MESSAGE_BYTES >> 20} MiB: have extra() return less"
                    )
                for held_back in self._held_back.values():
                    held_back.append(_Record(draft.iteration, draft.ends, data))
                self._pass_on()
            except Exception as error:  # noqa: BLE001 - the script's thread raises it
                # The script is further by then: what it is told of must be this iteration.
                if isinstance(error, RefusedError | state.StateError) and error.iteration is None:
                    error.iteration = draft.iteration
                self.error, self.failed_iteration = error, draft.iteration
                self._finish()
                return
            if not self._sinks:
                self._note(draft.iteration)

    def _next(self) -> RecordDraft | None:
        """Return the next iteration, and pass on records meanwhile; `None` at the end."""
        while any(self._held_back.values()):
            with suppress(queue.Empty):
                if (draft := self._queue.get(timeout=_POLL_SECONDS)) is not None:
                    return draft
                self._finish()
                return None
            self._pass_on()
        return self._queue.get()

    def _finish(self) -> None:
        """Pass on the rest, until `close` waits no more."""
        while any(self._held_back.values()):
            if self._closing.is_set():
                iteration = min(held_back[0].iteration for held_back in self._held_back.values() if held_back)
                _log.warning("iteration %d was not sent completely when training ended", iteration)
                return
            time.sleep(_POLL_SECONDS)
            self._pass_on()

    def _pass_on(self) -> None:
        """Give each node the records whose copies it has, or will have."""
        for sink in self._sinks:
            held_back = self._held_back[sink.node.id]
            while held_back and (
                len(held_back) > MAX_HELD_BACK
                or self._has_passed(sink.node.id, held_back[0].iteration, held_back[0].ends)
            ):
                record = held_back.popleft()
                sink.send(record.iteration, record.data + self._progress(sink))
                self._note(record.iteration)

    def _progress(self, sink: RecordSink) -> bytes:
        """Return what a part has for one node alone: serialized messages that follow each other are one."""
        progress = pb.RankProgress(
            trained=self._last_queued,
            waited_seconds=self._waited[sink.node.id],
            repairs_from=self._repairs_from(),
        )
        return pb.RecordPart(progress=progress).SerializeToString()

    def _note(self, iteration: int) -> None:
        """Note that an iteration was published."""
        first, self.newest = self.newest < 0, max(self.newest, iteration)
        if first:
            event = TRAINER_FIRST(iteration=iteration, seconds=seconds_since(self._began))
            say(logging.DEBUG, event, "iteration %d is the first", iteration)
