"""A script's loop over batches: marks where iterations end, and is entered again when a run resumes.

`Batches` is for scripts: a DataLoader's place, which a resumed run goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from checkmate import state
from checkmate.base.wording import counted
from checkmate.training.errors import RefusedError
from checkmate.training.record.generators import install_generators
from checkmate.training.record.recorder import Recorder
from checkmate.training.start.install import part_of
from checkmate.training.start.places import Place, Start

Batch = TypeVar("Batch")


class Loop:
    """The loop boundary of one protection."""

    def __init__(
        self,
        recorder: Recorder,
        generators: Mapping[str, Any] | None,
        has_begun: Callable[[], bool],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Create it.

        Args:
            recorder: Notes where iterations end.
            generators: States of random generators to set again after the iterator was created, if the run
                resumes between two batches of one.
            has_begun: Returns whether an iteration has begun since the start.
            at_end: Called after each iteration; it may raise.
        """
        self._recorder = recorder
        self._generators = generators
        self._has_begun = has_begun
        self._at_end = at_end

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. An iteration ends when the next batch is requested, before it is drawn."""
        self._recorder.enter_loop()
        iterator = iter(batches)
        generators, self._generators = self._generators, None  # the next loop is a new one
        if generators is not None and not self._has_begun():
            install_generators(dict(generators))
        for batch in iterator:
            try:
                yield batch
            except GeneratorExit:  # left by `break` or an error
                self._recorder.mark(left_loop=True)
                raise
            self._recorder.mark(in_loop=True)
            self._at_end()
        self._recorder.leave_loop()


def generators_of(place: Place, start: Start) -> Mapping[str, Any]:
    """Return this rank's random generators in the record from which a run resumes, with what was known then.

    They are empty in a run that does not resume.
    """
    data = part_of(start.record, place.position).rng
    return state.load_generators(data) if data else {}


_SHUFFLING: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of PyTorch whose order is drawn from a generator, and not from the number of the epoch."""


class Batches(Generic[Batch]):
    """The batches of a DataLoader, epoch after epoch, and the place of the next one.

    The place travels with each iteration's record if `extra` returns `state_dict()`. A resumed run loads it,
    and leaves used batches out by their indices, so that none is read again. Workers may fetch ahead.

        batches = checkmate.Batches(DataLoader(data, batch_size=16, sampler=DistributedSampler(data)))
        _, extra = checkmate.restore(ddp, optimizer)
        if extra is not None:
            batches.load_state_dict(extra)
        protection = checkmate.protect(ddp, optimizer, extra=batches.state_dict)
        for epoch in batches.epochs(10):
            for rows in protection.steps(batches):
                ...
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        """Take over a loader, which yields what is left of an epoch from then on.

        Args:
            loader: A loader of a dataset with indices. The order of its sampler must follow from the epoch's
                number, as that of PyTorch's DistributedSampler does, or be the same in all epochs.

        Raises:
            RefusedError: The loader's place can't be found by counting its batches.
        """
        whole: Any = loader.batch_sampler
        if whole is None or isinstance(loader.dataset, IterableDataset):
            raise RefusedError(
                "checkmate.Batches needs a DataLoader with batches of a dataset with indices. For an "
                "IterableDataset, or batch_size=None, use torchdata's StatefulDataLoader "
                "(`checkmate docs training`)"
            )
        rest = whole if isinstance(whole, _Rest) else None
        if rest is None and getattr(loader, "_iterator", None) is not None:
            raise RefusedError(
                "this DataLoader was iterated before, and its workers stay (persistent_workers=True), with "
                "the batches that it had then: make checkmate.Batches of it right after the loader itself"
            )
        # Of a loader that is taken over again, because workers that stay keep it.
        self._rest = _Rest(whole) if rest is None else rest
        samplers = list(_samplers([self._rest.batches, loader.sampler]))
        for sampler in samplers:
            if isinstance(sampler, _SHUFFLING):
                raise RefusedError(
                    f"the order of a {type(sampler).__name__} is another one in a resumed run: give "
                    "the DataLoader a sampler whose order follows from the epoch's number in place of "
                    "shuffle=True, such as torch.utils.data.DistributedSampler(dataset)"
                )
        self.loader = loader
        self.epoch, self.used = 0, 0
        self._is_over = False  # whether this epoch was iterated to its end
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
        # Not by its own __setattr__, which refuses this. A new loader would lack what a subclass has.
        loader.__dict__["batch_sampler"] = self._rest

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs below `count`, from the one in which a run resumes."""
        while self.epoch < count:
            for sampler in self._samplers:
                sampler.set_epoch(self.epoch)
            yield self.epoch
            self.epoch, self.used, self._is_over = self.epoch + 1, 0, False

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over what is left of this epoch. Raise `RefusedError` if nothing is."""
        if self._is_over:
            raise RefusedError(
                "all batches of this epoch are used up: go through the epochs with "
                "`for epoch in batches.epochs(count)`, which begins the next one, in place of range(count)"
            )
        self._rest.first = self.used
        return self._count(iter(self.loader))  # at once: it draws a random number (`Loop.steps`)

    def _count(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.used += 1
            yield batch
        self._is_over = True

    def __len__(self) -> int:
        """Return how many batches an epoch has."""
        return len(self._rest.batches)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, how many of its batches are used up, and how many it has."""
        return {"epoch": self.epoch, "used": self.used, "batches": len(self)}

    def load_state_dict(self, place: Mapping[str, int]) -> None:
        """Go on from a `state_dict`'s place. Raise `RefusedError` if an epoch had other batches there."""
        if (before := place["batches"]) != len(self):
            raise RefusedError(
                f"an epoch had {counted(before, 'batch', 'batches')}, and has {len(self):,} now, so that "
                "those that were used can't be left out: use the dataset, batch_size and number of ranks "
                "that the run began with, or begin the next epoch: `batches.epoch = extra['epoch'] + 1`"
            )
        self.epoch, self.used, self._is_over = place["epoch"], place["used"], False


def _samplers(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield samplers, and those that they wrap, each once."""
    ids = set[int]()
    todo = list(roots)
    while todo:
        sampler = todo.pop()
        if id(sampler) in ids:
            continue
        ids.add(id(sampler))
        yield sampler
        todo += [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)]


class _Rest(Sampler[list[int]]):
    """A sampler of batches without the first ones."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.first, None)

    def __len__(self) -> int:
        return len(self.batches) - self.first
