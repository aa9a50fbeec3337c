"""Comparison of two runs of one training job: equality, and additional cost. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from checkmate.base.wording import counted
from checkmate.state import local_of
from topologies.training.record import Interval, JobRecord, TimedBlock, interval


@dataclass(frozen=True)
class Promise:
    """A promise, whether it was kept, and the observation."""

    text: str
    is_kept: bool
    observation: str


@dataclass(frozen=True)
class Pairs:
    """Seconds per iteration in blocks of both runs, pair by pair."""

    reference: tuple[float, ...]
    protected: tuple[float, ...]

    @property
    def difference(self) -> Interval:
        """Additional seconds of the protected run."""
        return interval([b - a for a, b in zip(self.reference, self.protected, strict=True)])

    @property
    def ratio(self) -> Interval:
        """Ratio of the protected run's time to the reference."""
        return interval([b / a for a, b in zip(self.reference, self.protected, strict=True)])

    def data(self) -> dict[str, Any]:
        """Return plain data, with the intervals if there are enough pairs."""
        enough = len(self.reference) > 1
        intervals = {"difference": asdict(self.difference), "ratio": asdict(self.ratio)} if enough else {}
        return {**asdict(self), **intervals}


@dataclass(frozen=True)
class Cost:
    """Cost of protection to the trainers: time, and processor time of all ranks together."""

    seconds: Pairs
    processor: Pairs


def cost(reference: JobRecord, protected: JobRecord, iterations: int, block: int) -> Cost:
    """Return the cost over the blocks that both runs completed.

    It excludes the first block, which includes the setup, the last, and those in which a rank was killed. It
    also excludes the first iteration of each block, which waits for its turn.
    """
    broken = {recovery.iteration for recovery in protected.recoveries()} | set(protected.repeated)
    pairs: list[tuple[TimedBlock, TimedBlock]] = []
    for first in range(block, iterations - block, block):
        if broken.isdisjoint(range(first, first + block)):
            protected_block, reference_block = (
                run.block(first + 1, first + block) for run in (protected, reference)
            )
            if protected_block is not None and reference_block is not None:
                pairs.append((reference_block, protected_block))
    return Cost(
        Pairs(tuple(a.seconds for a, _ in pairs), tuple(b.seconds for _, b in pairs)),
        Pairs(tuple(a.processor for a, _ in pairs), tuple(b.processor for _, b in pairs)),
    )


def promises(
    reference: JobRecord, protected: JobRecord, iterations: int, kills: int, states: Mapping[str, object]
) -> list[Promise]:
    """Return Checkmate's promises for a run with `kills` kills, compared with one without.

    Args:
        reference: The uninterrupted run.
        protected: The protected run.
        iterations: The number of iterations.
        kills: The number of killed ranks.
        states: Final parameters and optimizer state, by the name of their holder.
    """
    return [
        _losses(reference, protected, iterations),
        _digests(reference, protected),
        _states(states),
        _repeated(protected, kills),
        _resumed(protected, kills),
    ]


def _losses(reference: JobRecord, protected: JobRecord, iterations: int) -> Promise:
    pairs = [
        (reference.losses[rank].get(i), protected.losses.get(rank, {}).get(i))
        for rank in reference.losses
        for i in range(iterations)
    ]
    equal = sum(a is not None and a == b for a, b in pairs)
    changes = protected.changed_when_repeated
    again = f"; changed when repeated: {changes}" if changes else ""
    promise = "the losses of every iteration are bit-identical to the uninterrupted run's, on each rank"
    observation = f"{equal} of {len(pairs)} ({iterations} iterations on {len(reference.losses)} ranks){again}"
    return Promise(promise, equal == len(pairs) > 0 and not changes, observation)


def _digests(reference: JobRecord, protected: JobRecord) -> Promise:
    digests = [*reference.digests.values(), *protected.digests.values()]
    expected = len(reference.events) + len(protected.events)
    promise = "each rank of both runs ends with the same parameters and optimizer state"
    different = sorted(set(digests))
    observation = (
        f"{counted(len(different), 'digest')} on {len(digests)} of {expected} ranks: {', '.join(different)}"
    )
    return Promise(promise, len(digests) == expected and len(different) == 1, observation)


def _states(states: Mapping[str, object]) -> Promise:
    (_, reference), *compared = states.items()
    unequal = {name: differences(reference, state) for name, state in compared}
    promise = f"parameters and optimizer state of {', '.join(states)}: torch.equal, tensor by tensor"
    wrong = "; ".join(f"{name} differs at {', '.join(at[:3])}" for name, at in unequal.items() if at)
    observation = wrong or f"{len(list(leaves(reference)))} tensors equal"
    return Promise(
        promise, not wrong and bool(compared) and any(True for _ in leaves(reference)), observation
    )


def _repeated(protected: JobRecord, kills: int) -> Promise:
    repeated = protected.repeated
    worst = sum(count - 1 for count in repeated.values())
    promise = "a crash repeats at most one iteration that was completed"
    iterations = ", ".join(map(str, repeated)) or "none"
    return Promise(
        promise, worst <= kills, f"repeated: {iterations}, in {counted(kills, 'crash', 'crashes')}"
    )


def _resumed(protected: JobRecord, kills: int) -> Promise:
    recoveries = protected.recoveries()
    promise = "training resumes from the shadow nodes, not from the start"
    observation = "; ".join(
        f"killed in iteration {r.iteration}, resumed with {r.resumed_with}" for r in recoveries
    )
    is_kept = len(recoveries) == kills and all(r.resumed_with >= r.iteration - 1 for r in recoveries)
    return Promise(promise, is_kept, observation or "no rank resumed")


def leaves(state: object, path: str = "") -> Sequence[tuple[str, object]]:
    """Return every leaf of a nested state, with its path."""
    if isinstance(state, Mapping):
        return [leaf for key in state for leaf in leaves(state[key], f"{path}.{key}".lstrip("."))]
    if isinstance(state, list | tuple):
        return [
            leaf
            for i, leaf_or_tree in enumerate(state)
            for leaf in leaves(leaf_or_tree, f"{path}.{i}".lstrip("."))
        ]
    return [(path, state)]


def differences(state: object, reference: object) -> list[str]:
    """Return the paths at which two states differ."""
    leaves_of_state, leaves_of_reference = dict(leaves(state)), dict(leaves(reference))
    return [
        key
        for key in {**leaves_of_state, **leaves_of_reference}
        if key not in leaves_of_state
        or key not in leaves_of_reference
        or not _equal(leaves_of_state[key], leaves_of_reference[key])
    ]


def digest(state: object) -> bytes:
    """Return a digest of 16 bytes: equal if all tensors have the same bits and all else is equal.

    Of a sharded tensor, this rank's part counts.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(state):
        for part in (path.encode(), _bits(leaf)):
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
    return hasher.digest()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _bits(leaf: object) -> bytes:
    """Return a leaf's type and value, and a tensor's shape."""
    if isinstance(leaf, torch.Tensor):
        leaf = local_of(leaf)
        flat = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
        return f"tensor {leaf.dtype} {tuple(leaf.shape)} ".encode() + flat.numpy().tobytes()
    return f"{type(leaf).__name__} {leaf!r}".encode()
