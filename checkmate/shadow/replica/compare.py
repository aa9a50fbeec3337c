"""Comparison of a replica's state with slices of the trainers' state (design, section 7).

Whatever differs is suspect, even after it has been reseeded, until it is found equal after steps of our own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.parameter import StoredParameter
from checkmate.state import bytes_of, same_bits, to_number

CLOSE_ENOUGH: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    torch.float64: (1e-8, 1e-10),
    torch.float32: (1e-4, 1e-6),
    torch.bfloat16: (4e-2, 1e-4),
    torch.float16: (5e-3, 1e-5),
}
"""Relative and absolute tolerance if the trainers step on another kind of device."""

STEPS_TO_TRUST: Final = 2
"""Number of our own steps since seeding after which changes outside the optimizer's step show."""


CAUSES: Final = (
    "Possible causes: a gradient was changed between backward and optimizer.step(), a parameter outside "
    "optimizer.step(). Clip gradients by norm, unscale them with the GradScaler that protect was given, and "
    "let only the optimizer change parameters"
)
CAUSES_BETWEEN_RANKS: Final = (
    "Possible causes: ranks step with different gradients or parameters, or a parameter was changed outside "
    "optimizer.step(). Have all ranks of a DP group begin with the same parameters and average their "
    "gradients, as DDP does, and let only the optimizer change parameters"
)
"""With copies by hosts, each rank sends a part of the gradients that its own step uses."""

Compared = tuple[int, str]
"""A parameter and an entry of its optimizer state; an empty entry is the parameter itself."""


class Comparison:
    """Results of all comparisons so far. Only the stepping thread uses it."""

    def __init__(self, *, exact: bool, causes: str = CAUSES) -> None:
        """Compare bits if `exact`, because the trainers' own step gives the same bits.

        `causes`: what may have caused a difference, and the remedies, in sentences.
        """
        self.exact = exact
        self._causes = causes
        self.doubtful: dict[int, int] = {}
        """Parameters found wrong and not reseeded since, with the iteration after which they are in doubt."""
        self.suspects: dict[Compared, range] = {}
        """Bytes that were found wrong and have not been found right since."""
        self._equal: dict[Compared, int] = {}  # last iteration found right since seeding
        self._seeded: dict[int, int] = {}

    def to_messages(self) -> list[pb.Suspect]:
        """Return the suspects as messages for replies to trainers."""
        return [
            pb.Suspect(parameter=number, state=entry, start=run.start, stop=run.stop)
            for (number, entry), run in self.suspects.items()
        ]

    def seeded(self, number: int, iteration: int, entries: Collection[str]) -> None:
        """Record that a parameter was seeded, with these entries of optimizer state."""
        self._seeded[number] = iteration
        self._equal = {key: at for key, at in self._equal.items() if key[0] != number}
        self.doubtful.pop(number, None)
        for key in [(n, entry) for n, entry in self.suspects if n == number and entry not in ("", *entries)]:
            del self.suspects[key]  # the trainers no longer have it

    def compare(
        self, iteration: int, slices: Sequence[pb.Slice], parameters: Mapping[int, StoredParameter]
    ) -> Iterator[str]:
        """Compare parameters, at `iteration`, with the trainers' slices. Yield a message per difference.

        The first one has the causes.
        """
        causes = f"; checkpoints after that one are doubtful. {self._causes}"
        for part in slices:
            parameter, key = parameters.get(part.parameter), (part.parameter, part.state)
            if parameter is None:
                continue
            run = range(part.offset, part.offset + max(len(part.data), 1))
            if self._same(parameter, part):
                self._right(key, iteration, run)
                continue
            before = self.suspects.get(key, run)
            self.suspects[key] = range(min(run.start, before.start), max(run.stop, before.stop))
            seeded = self._seeded[part.parameter]
            since = self.doubtful.setdefault(part.parameter, self._equal.get(key, seeded))
            of = f"{part.state} of parameter" if part.state else "parameter"
            yield (
                f"{of} {parameter.parameter.name} differs from the trainers' after iteration {iteration}. "
                f"It was last found equal after iteration {since}{causes}"
            )
            causes = ""

    def _right(self, key: Compared, iteration: int, run: range) -> None:
        """Record that a run was found right. It is no longer suspect if enough of our own steps preceded."""
        self._equal[key] = iteration
        suspect = self.suspects.get(key)
        if suspect is None or iteration < self._seeded[key[0]] + STEPS_TO_TRUST:
            return
        if suspect.start in run:
            suspect = range(run.stop, suspect.stop)
        if suspect:
            self.suspects[key] = suspect
        else:
            del self.suspects[key]

    def _same(self, parameter: StoredParameter, part: pb.Slice) -> bool:
        try:
            value = parameter.entry(part.state)
        except KeyError:
            return False
        if not isinstance(value, torch.Tensor):
            return part.HasField("number") and part.number == to_number(part.state, value)
        return not part.HasField("number") and self._same_run(value, part)

    def _same_run(self, tensor: torch.Tensor, part: pb.Slice) -> bool:
        """Return whether a tensor has this run, within a tolerance unless `exact`. All NaNs are alike.

        For state the tolerance is relative to the run's largest value, because sums of values that cancel out
        keep the errors of their terms.
        """
        run = bytes_of(tensor)[part.offset : part.offset + len(part.data)]
        if len(run) != len(part.data) or len(run) % tensor.element_size():
            return False
        if bytes(run) == part.data:
            return True
        if not part.data or not tensor.is_floating_point():
            return False
        relative, absolute = CLOSE_ENOUGH[tensor.dtype]
        start = part.offset // tensor.element_size()
        trainer_values = torch.frombuffer(bytearray(part.data), dtype=tensor.dtype)
        replica_values = tensor.reshape(-1)[start : start + len(trainer_values)]
        if self.exact:
            return same_bits(trainer_values, replica_values)
        trainer_values, replica_values = trainer_values.double(), replica_values.double()
        if part.state:
            absolute = max(absolute, relative * float(trainer_values.abs().nan_to_num(0.0, 0.0).max()))
        return torch.allclose(replica_values, trainer_values, relative, absolute, equal_nan=True)
