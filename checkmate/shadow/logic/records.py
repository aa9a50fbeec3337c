"""Step records of a DP group: assembled from all ranks' parts, and kept while an iteration is served.

Data is kept as received, except that buffers are split by name (read weights-only, so that no code can run).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb


class Spans:
    """Iterations that were passed over, each with the time when that was first noticed."""

    def __init__(self) -> None:
        self._spans: list[tuple[range, float]] = []  # without overlap, in order

    def __bool__(self) -> bool:
        return bool(self._spans)

    def add(self, skipped: range, now: float) -> None:
        """Add iterations; those that are there already keep their time."""
        new = [skipped]
        for present, _ in self._spans:
            new = [part for rest in new for part in _without(rest, present)]
        self._spans = sorted([*self._spans, *((rest, now) for rest in new)], key=lambda span: span[0].start)

    def remove(self, iteration: int) -> None:
        """Remove an iteration, if it is there."""
        self._spans = [
            (part, since)
            for span, since in self._spans
            for part in _without(span, range(iteration, iteration + 1))
        ]

    def since(self, iteration: int) -> float | None:
        """Return the time of an iteration, or `None` if it is not there."""
        return next((since for span, since in self._spans if iteration in span), None)

    def forget(self, iteration: int) -> int | None:
        """Remove iterations up to this one, and return the greatest of them, if any."""
        lasts = [min(iteration, span[-1]) for span, _ in self._spans if span.start <= iteration]
        self._spans = [
            (range(max(span.start, iteration + 1), span.stop), since)
            for span, since in self._spans
            if span[-1] > iteration
        ]
        return max(lasts, default=None)


def _without(span: range, excluded: range) -> list[range]:
    """Return the parts of a range outside of another one."""
    parts = (
        range(span.start, min(span.stop, excluded.start)),
        range(max(span.start, excluded.stop), span.stop),
    )
    return [part for part in parts if part]


StreamKey = tuple[int, int, int]
"""Position of the sending rank, channel, shard."""

SPARE_BYTES, SPARE_ITERATIONS = 16 << 20, 256
"""Limits of parts that are kept although no hold here needs them."""
PART_BYTES = 1024
"""Memory of a part beside its data."""


class _ServedRecord(NamedTuple):
    """Data served with an iteration; it becomes a message only on demand, because buffers may be large."""

    parts: Sequence[pb.RecordPart]
    buffers: Mapping[str, bytes]


class Records:
    """The records of a group's ranks. Not thread-safe; the node's lock covers it."""

    def __init__(self, ranks: int, first: int, buffers: Iterable[str] = ()) -> None:
        """Create records of `ranks` ranks from iteration `first`, with these names of buffers."""
        self._ranks = ranks
        self._expected = frozenset(buffers)
        self._parts: dict[int, dict[int, pb.RecordPart]] = {}
        self._sizes: dict[int, int] = {}  # bytes of an iteration's parts
        self.nbytes = 0
        """Bytes of all parts."""
        self._served: dict[int, _ServedRecord] = {}
        self._buffers: dict[str, bytes] = {}  # replaced, never changed, because served data shares it
        self._buffer_iterations: dict[str, int] = {}
        """The last iteration whose record had each buffer."""
        self._merged = first - 1
        self._oldest = first - 1
        """Parts of earlier iterations are spare."""
        self._passed_over = Spans()
        """Iterations whose part from the first rank is lost, in which buffers may have changed."""
        self._forgotten = first - 1
        """The newest iteration at which all earlier buffers were discarded."""
        self._wants_buffers = False
        self._merged_buffers: set[int] = set()
        """Iterations whose buffers were merged."""
        self.trouble = ""
        """Description of data that cannot be read."""
        self.first = first
        self.ends: dict[StreamKey, int] = {}
        """Newest recorded end of each stream."""
        self.repairs_from: dict[int, int] = {}
        """The oldest iteration that each rank can send again, by position, of those that can."""
        self.newest = first - 1
        """The newest iteration with a part."""
        self.missing = Spans()
        """Iterations that a rank skipped, with the time when this was noticed."""
        self.count = 0
        """Number of received parts."""
        self._last_of: dict[int, int] = {}

    def add(self, part: pb.RecordPart, now: float) -> None:
        """Add a rank's part. Ignore duplicates."""
        parts = self._parts.setdefault(part.iteration, {})
        if part.position in parts:
            return
        parts[part.position] = part
        nbytes = part.ByteSize() + PART_BYTES
        self._sizes[part.iteration] = self._sizes.get(part.iteration, 0) + nbytes
        self.nbytes += nbytes
        self.count += 1
        self.newest = max(self.newest, part.iteration)
        for end in part.ends:
            key = (part.position, end.channel, end.shard)
            self.ends[key] = max(self.ends.get(key, 0), end.end)
        skipped = range(self._last_of.get(part.position, part.iteration) + 1, part.iteration)
        if skipped:
            self.missing.add(skipped, now)
            if part.position == 0:
                self._passed_over.add(skipped, now)
                self._wants_buffers = bool(self._expected)
        if part.position == 0:
            self._passed_over.remove(part.iteration)  # it has been copied from another node
        self._last_of[part.position] = max(self._last_of.get(part.position, -1), part.iteration)
        if self.complete(part.iteration):
            self.missing.remove(part.iteration)
        if part.iteration <= self._merged:
            self._merge(part.iteration)

    def complete(self, iteration: int) -> bool:
        """Return whether the parts of all ranks of an iteration are present."""
        return len(self._parts.get(iteration, ())) == self._ranks

    def step(self, iteration: int) -> pb.Step:
        """Return the first rank's record of the step. Raise `KeyError` if it is missing."""
        return self._parts[iteration][0].step

    def keep(self, iteration: int) -> None:
        """Keep the data to serve with an iteration that a hold has stepped.

        Earlier iterations are kept, too, because another hold may be behind and need their buffers.
        """
        for t in sorted(self._parts):
            if self._oldest <= t <= iteration and t not in self._served:
                self._merge(t)
                if self.complete(t):
                    ordered = [self._parts[t][position] for position in sorted(self._parts[t])]
                    self._served[t] = _ServedRecord(ordered, self._buffers)

    def served(self, iteration: int) -> pb.IterationRecord:
        """Return the record to serve with the state after an iteration; without parts if unknown."""
        parts, buffers = self._served.get(iteration, _ServedRecord((), {}))
        return pb.IterationRecord(iteration=iteration, parts=parts, buffers=buffers)

    def lacking(self, iteration: int) -> int:
        """Return the number of unknown buffers after an iteration."""
        record = self._served.get(iteration)
        return len(self._expected - (self._buffers if record is None else record.buffers).keys())

    def take_wants_buffers(self) -> bool:
        """Return, once, whether the first rank must send all buffers again."""
        wants, self._wants_buffers = self._wants_buffers, False
        return wants

    def adopt(self, record: pb.IterationRecord) -> None:
        """Take over the record of an iteration before these records, or from another holder."""
        if record.parts:
            self._served.setdefault(record.iteration, _ServedRecord(record.parts, dict(record.buffers)))
        self._forget_buffers(record.iteration)
        if record.iteration >= self._forgotten:
            self._take(record.buffers, record.iteration)

    def _forget_buffers(self, iteration: int) -> None:
        """Discard buffers that are older than a skipped iteration."""
        if (skipped := self._passed_over.forget(iteration)) is not None:
            self._forgotten = skipped
            self._buffer_iterations = {
                name: last for name, last in self._buffer_iterations.items() if last >= self._forgotten
            }
            self._buffers = {name: self._buffers[name] for name in self._buffer_iterations}

    def _take(self, buffers: Mapping[str, bytes], iteration: int) -> None:
        """Update buffers to their state after an iteration, unless newer ones are known."""
        newer = {
            name: data
            for name, data in buffers.items()
            if self._buffer_iterations.get(name, iteration) <= iteration
        }
        self._buffer_iterations.update(dict.fromkeys(newer, iteration))
        self._buffers = {**self._buffers, **newer}

    def forget(self, stepped: Iterable[int], reserved: Collection[int]) -> None:
        """Drop parts before the oldest hold's last step, and served records that can no longer be requested.

        The parts of that last step stay, because `keep` may not have been called for it yet. Some earlier
        parts stay, too, because another node may lack them.
        """
        last_steps = set(stepped)
        oldest = min(last_steps, default=self.first - 1)
        self._oldest = oldest
        spare = sorted(iteration for iteration in self._parts if iteration < oldest)
        for iteration in spare:
            self._merge(iteration)  # no hold steps it, but its buffers may never be sent again
        nbytes = sum(self._sizes[iteration] for iteration in spare)
        while spare and (nbytes > SPARE_BYTES or len(spare) > SPARE_ITERATIONS):
            iteration = spare.pop(0)
            self.nbytes -= self._sizes[iteration]
            nbytes -= self._sizes.pop(iteration)
            del self._parts[iteration]
            self._merged_buffers.discard(iteration)
        for iteration in [
            t for t in self._served if t < oldest and t not in last_steps and t not in reserved
        ]:
            del self._served[iteration]
        self.missing.forget(oldest)

    def part_ranges(self) -> list[pb.PartRange]:
        """Return the present parts, as ranges by rank."""
        ranges: list[pb.PartRange] = []
        for position in range(self._ranks):
            for t in sorted(t for t, parts in self._parts.items() if position in parts):
                last = ranges[-1] if ranges else None
                if last is not None and (last.position, last.last + 1) == (position, t):
                    last.last = t
                else:
                    ranges.append(pb.PartRange(position=position, first=t, last=t))
        return ranges

    def parts_of(self, ranges: Iterable[pb.PartRange]) -> list[pb.RecordPart]:
        """Return the present parts of some ranges, in order."""
        return [
            part
            for span in ranges
            for t in sorted(t for t in self._parts if span.first <= t <= span.last)
            if (part := self._parts[t].get(span.position)) is not None
        ]

    def _merge(self, iteration: int) -> None:
        """Merge an iteration's buffers, unless newer ones are known."""
        self._merged = max(self._merged, iteration)
        self._forget_buffers(iteration)
        first = self._parts[iteration].get(0)
        if first is None or not first.buffers or iteration in self._merged_buffers:
            return
        self._merged_buffers.add(iteration)
        try:
            buffers = _by_name(first.buffers)
        except state.StateError as error:
            # Only the first: each iteration may have such buffers.
            self.trouble = (
                self.trouble or f"cannot read buffers of iteration {iteration}, older ones are kept: {error}"
            )
            return
        if iteration > self._forgotten:
            self._take(buffers, iteration)


def _by_name(blob: bytes) -> Mapping[str, bytes]:
    buffers = state.loads(blob)
    if not isinstance(buffers, dict):
        return {}
    return {str(name): state.dumps(tensor) for name, tensor in buffers.items()}
