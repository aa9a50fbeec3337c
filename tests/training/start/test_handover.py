"""Data that Checkmate attaches to models and parameters, and copies of these."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.job.schema import JOB_VARIABLE
from checkmate.keys.roles import Role
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training import protect
from checkmate.training.attached import attached
from checkmate.training.errors import SessionError
from checkmate.training.model.ddp import DdpModel
from checkmate.training.record.wrapped import ClipListener
from checkmate.training.start.places import Handover, Start
from checkmate.training.start.plans import plan_without_state
from testbed.jobs import job, job_data
from tests.support.job_files import write
from tests.support.keys import role_keys
from tests.support.shadow.recording_node import RecordingNode
from tests.support.training.alone import alone
from tests.support.training.rank_processes import RankProcesses


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    with alone():
        yield DistributedDataParallel(nn.Linear(4, 2))


@pytest.fixture
def protected_model(ddp: DistributedDataParallel) -> Iterator[Handover]:
    handover = Handover.of(DdpModel(ddp))
    handover.hold()
    yield handover
    handover.release()


def test_what_was_restored_is_kept_for_its_own_model_and_taken_once(ddp: DistributedDataParallel) -> None:
    start = Start(plan_without_state(3, ""))
    Handover.of(DdpModel(ddp)).restored(start, Stubs(job(), None), first=True)
    assert Handover.of(DdpModel(DistributedDataParallel(nn.Linear(4, 2)))).take_start() is None
    wrapped_again = DistributedDataParallel(ddp.module)
    assert Handover.of(DdpModel(wrapped_again)).take_start() is start
    assert Handover.of(DdpModel(ddp)).take_start() is None


def test_connections_to_nodes_are_kept_on_the_first_rank(ddp: DistributedDataParallel) -> None:
    handover, start = Handover.of(DdpModel(ddp)), Start(plan_without_state(3, ""))
    stubs = Stubs(job(), None)
    handover.restored(start, stubs, first=True)
    assert handover.take_stubs(job(), None) is stubs
    assert handover.take_stubs(job(), None) is not stubs
    handover.restored(start, stubs, first=False)
    assert handover.take_stubs(job(), None) is not stubs
    assert_closed(stubs)


def test_connections_are_not_kept_for_another_job(ddp: DistributedDataParallel) -> None:
    handover, stubs = Handover.of(DdpModel(ddp)), Stubs(job(), None)
    handover.restored(Start(plan_without_state(3, "")), stubs, first=True)
    assert handover.take_stubs(job(nodes=3), None).job == job(nodes=3)
    assert_closed(stubs)


def test_connections_are_not_kept_for_other_keys(ddp: DistributedDataParallel, tmp_path: Path) -> None:
    handover = Handover.of(DdpModel(ddp))
    keys = role_keys(job(), tmp_path / "keys", Role.TRAINER)
    stubs = Stubs(job(), None)
    handover.restored(Start(plan_without_state(3, "")), stubs, first=True)
    assert handover.take_stubs(job(), keys).keys == keys
    assert_closed(stubs)


class _Assembled(Exception):
    """`protect` has come to where it uses the stubs."""


def _protects(_: int, __: int, file: Path) -> tuple[bool, bool]:
    """Restore and protect. Return whether connections were kept, and whether `protect` was given these."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, {JOB_VARIABLE: str(file)}):
        checkmate.restore(model, optimizer)
        stubs = Handover.of(DdpModel(model))._stubs
        with (
            mock.patch.object(protect, "_assemble", side_effect=_Assembled) as assemble,
            pytest.raises(_Assembled),
        ):
            checkmate.protect(model, optimizer)
    protect_stubs = next(argument for argument in assemble.call_args.args if isinstance(argument, Stubs))
    assert_closed(protect_stubs)
    return stubs is not None, protect_stubs is stubs


def test_protect_uses_the_connections_of_restore(
    ranks: RankProcesses, node: RecordingNode, tmp_path: Path
) -> None:
    """The first rank does; another one, which needs none, opens its own. A failure closes them."""
    data = job_data(ranks=2, nodes=1)
    data["shadow_nodes"][0]["mgmt"] = node.address
    assert ranks.run(2, _protects, write(tmp_path, data)) == [(True, True), (False, False)]


def assert_closed(stubs: Stubs) -> None:
    with pytest.raises(ValueError, match="closed"):
        stubs.to(0).Status(pb.StatusRequest())


def test_one_model_is_protected_at_a_time(ddp: DistributedDataParallel, protected_model: Handover) -> None:
    with pytest.raises(SessionError, match="this model is already protected"):
        Handover.of(DdpModel(ddp))
    with pytest.raises(SessionError, match="this model is already protected"):
        Handover.of(DdpModel(DistributedDataParallel(ddp.module)))
    with pytest.raises(SessionError, match="another model of this process is already protected"):
        Handover.of(DdpModel(DistributedDataParallel(nn.Linear(4, 2))))
    protected_model.release()
    assert Handover.of(DdpModel(ddp)) is protected_model


def test_copies_of_a_protected_model_are_not_protected(
    ddp: DistributedDataParallel, protected_model: Handover
) -> None:
    calls: list[str] = []
    parameters = list(ddp.module.parameters())
    listener = ClipListener(
        parameters, lambda: calls.append("before"), lambda _, factor: calls.append("after")
    )
    model = ddp.module
    buffer = io.BytesIO()
    torch.save([model, parameters], buffer)
    buffer.seek(0)
    read, _ = torch.load(buffer, weights_only=False)
    for duplicate in (copy.deepcopy(model), read):
        assert attached(duplicate, Handover) is None
        for parameter in duplicate.parameters():
            parameter.grad = torch.ones_like(parameter)
        checkmate.clip_grad_norm_(duplicate.parameters(), 1.0)
    assert calls == []
    buffer = io.BytesIO()
    torch.save(parameters, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    checkmate.clip_grad_norm_(parameters, 1.0)
    assert calls == ["before", "after"]
    listener.close()
    checkmate.clip_grad_norm_(parameters, 1.0)
    assert calls == ["before", "after"]


@pytest.mark.parametrize("protected", [False, True])
def test_a_restored_model_that_trains_without_protect_is_named_once(
    protected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A newcomer forgot it, and learned so after the crash only."""
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    handover = Handover()
    handover.warn_if_unprotected(optimizers)
    if protected:
        handover.take_start()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert caplog.text.count("checkmate.protect was not called") == (not protected)
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers)
