"""`checkmate.Batches`: a DataLoader's place, from which a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

import checkmate

ROWS, EPOCHS = 23, 3


class Rows(Dataset[int]):
    """Row numbers; `read` are those that were read in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        self.read.append(row)
        return row


def sampler_of(data: Rows) -> DistributedSampler[int]:
    return DistributedSampler(data, num_replicas=2, rank=1, seed=5)


def loaders(kind: str) -> DataLoader[int]:
    data = Rows()
    if kind == "in this order":
        return DataLoader(data, 4)
    if kind == "a sampler of batches":
        return DataLoader(data, batch_sampler=BatchSampler(sampler_of(data), 4, drop_last=True))
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if kind == "a worker" else {}
    return DataLoader(data, 4, sampler=sampler_of(data), **options)


def train(batches: checkmate.Batches[Any], turns: int = 1000) -> list[tuple[int, list[int]]]:
    """Return the epoch and the rows of each turn, up to a number of turns."""
    trained = list[tuple[int, list[int]]]()
    for epoch in batches.epochs(EPOCHS):
        for rows in batches:
            trained.append((epoch, rows.tolist()))
            if len(trained) == turns:
                return trained
    return trained


@pytest.mark.parametrize("kind", ["in this order", "a sampler", "a sampler of batches", "a worker"])
def test_a_resumed_run_has_the_rest_of_the_batches(kind: str) -> None:
    batches = checkmate.Batches(loaders(kind))
    whole = train(batches)
    assert len(whole) == EPOCHS * len(batches)
    different = len({str(rows) for _, rows in whole})
    assert different == (len(batches) if kind == "in this order" else len(whole))
    for turns in range(1, len(whole) if kind != "a worker" else 3):
        killed = checkmate.Batches(loaders(kind))
        assert train(killed, turns) == whole[:turns]
        resumed = checkmate.Batches(loaders(kind))
        resumed.load_state_dict(killed.state_dict())
        assert train(resumed) == whole[turns:]


def test_used_batches_are_not_read_again() -> None:
    batches = checkmate.Batches(loaders("a sampler"))
    batches.load_state_dict({"epoch": EPOCHS - 1, "used": 2, "batches": 3})
    (last,) = train(batches)
    read: list[int] = batches.loader.dataset.read  # type: ignore[attr-defined]
    assert read == last[1]


@pytest.mark.parametrize("kind", ["a sampler", "a worker"])
def test_a_loader_may_be_taken_over_again(kind: str) -> None:
    loader = loaders(kind)
    whole = train(checkmate.Batches(loader))
    assert train(checkmate.Batches(loader)) == whole


def test_an_iterator_draws_its_random_number_when_it_is_made() -> None:
    """Because `steps` sets random generators again after that."""
    batches = checkmate.Batches(loaders("a sampler"))
    before = torch.get_rng_state()
    iterator = iter(batches)
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    next(iterator)
    assert torch.equal(torch.get_rng_state(), after)


def test_an_epoch_that_is_over_is_not_silently_empty() -> None:
    batches = checkmate.Batches(loaders("a sampler"))
    with pytest.raises(checkmate.RefusedError, match=r"batches.epochs\(count\)"):
        for _ in range(EPOCHS):
            for _ in batches:
                pass
    resumed = checkmate.Batches(loaders("a sampler"))
    resumed.load_state_dict(batches.state_dict())  # at the end of an epoch
    assert [epoch for epoch, _ in train(resumed)] == [1] * len(batches) + [2] * len(batches)


def test_other_batches_than_before_are_refused() -> None:
    place = checkmate.Batches(loaders("a sampler")).state_dict()
    data = Rows()
    with pytest.raises(checkmate.RefusedError, match="an epoch had 3 batches, and has 6 now"):
        checkmate.Batches(DataLoader(data, 2, sampler=sampler_of(data))).load_state_dict(place)


class Wrapper(Sampler[int]):
    """A sampler that hides another one."""

    def __init__(self, inner: Sampler[int]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self._inner)


def iterated() -> DataLoader[int]:
    loader = loaders("a worker")
    next(iter(loader))
    return loader


class Stream(IterableDataset[int]):
    """A dataset without indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Rows(), 4, shuffle=True), "the order of a RandomSampler is another one"),
        (
            lambda: DataLoader(Rows(), 4, sampler=Wrapper(RandomSampler(Rows()))),
            "the order of a RandomSampler",
        ),
        (iterated, "was iterated before, and its workers stay"),
        (lambda: DataLoader(Stream(), 4), "needs a DataLoader with batches of a dataset with indices"),
        (lambda: DataLoader(Rows(), batch_size=None), "needs a DataLoader with batches"),
    ],
)
def test_a_loader_whose_place_cannot_be_counted_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(checkmate.RefusedError, match=words):
        checkmate.Batches(loader())
