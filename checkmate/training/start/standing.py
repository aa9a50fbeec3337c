"""What a model is to Checkmate from `restore` to the end of its protection; kept at the model itself."""

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
    """How this start of training began, kept from `restore` for `protect`."""

    plan: RestartPlan
    next_iteration: int = 0
    keep: bool = False
    record: pb.IterationRecord = field(default_factory=pb.IterationRecord)
    own_buffers: list[str] = field(default_factory=list)


class ModelStanding(AttachedData):
    """A model's standing: how it was restored, until `protect` takes that, and whether it is protected."""

    protected: ClassVar[ModelStanding | None] = None
    """The protected model's: a process has one place in its job, and so one such model at a time."""

    def __init__(self) -> None:
        self.start: Start | None = None

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> ModelStanding:
        """The standing of the model inside a DDP. `SessionError` if this or another one is protected."""
        found = attached(ddp.module, cls)
        if found is None:
            found = cls()
            attach(ddp.module, found)
        if cls.protected is found:
            raise SessionError("this model is protected already: close that Protection first")
        if cls.protected is not None:
            raise SessionError("another model of this process is protected: a job has one; close that first")
        return found

    def take_start(self) -> Start | None:
        """The last `restore`'s outcome, once."""
        start, self.start = self.start, None
        return start

    def hold(self) -> None:
        """The model is protected from now on."""
        ModelStanding.protected = self

    def release(self) -> None:
        """The model is protected no more."""
        ModelStanding.protected = None
