"""A model's state in Checkmate, from `restore` to the end of its protection; attached to the model itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.nn.parallel import DistributedDataParallel

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.attached import AttachedData, attach, attached
from checkmate.training.start.fence import RestartPlan
from checkmate.training.start.membership import SessionError


@dataclass
class Start:
    """The outcome of `restore`, kept for `protect`."""

    plan: RestartPlan
    next_iteration: int = 0
    keep: bool = False
    record: pb.IterationRecord = field(default_factory=pb.IterationRecord)


class ModelStanding(AttachedData):
    """A model's standing: the outcome of its `restore`, and whether it is protected."""

    protected: ClassVar[ModelStanding | None] = None
    """The protected model's standing. There is one at a time, because a process has one place in its job."""

    def __init__(self) -> None:
        self.start: Start | None = None

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> ModelStanding:
        """Return the standing of the model inside a DDP. Raise `SessionError` if a model is protected."""
        found = attached(ddp.module, cls)
        if found is None:
            found = cls()
            attach(ddp.module, found)
        if cls.protected is found:
            raise SessionError("this model is already protected: close its Protection first")
        if cls.protected is not None:
            raise SessionError(
                "another model of this process is already protected: close its Protection first, because a "
                "process can protect only one"
            )
        return found

    def take_start(self) -> Start | None:
        """Return the outcome of the last `restore`, and forget it."""
        start, self.start = self.start, None
        return start

    def hold(self) -> None:
        """Note that the model is protected."""
        ModelStanding.protected = self

    def release(self) -> None:
        """Note that the model is not protected any more."""
        ModelStanding.protected = None
