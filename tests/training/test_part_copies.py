"""The part of the gradients that a rank sends with copies by hosts: its bytes, and when it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from checkmate.job.files import read_job
from checkmate.state import bytes_of
from checkmate.training.errors import RefusedError
from checkmate.training.gradients import part_copies
from checkmate.training.gradients.part_copies import PartCopies, StepFront
from checkmate.training.model.trained import BareModel, TrainedModel
from checkmate.training.start.places import Place, Start, lay_out
from checkmate.training.start.plans import NewRun, new_run_fields
from checkmate.wire.layout import Layout
from checkmate.wire.parts import PartSlicing

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="gradients on a GPU need a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


class KeptStream:
    """A stream that keeps what is put, in place of one to a node."""

    is_behind = False
    """Whether its node takes too little."""

    def __init__(self, node: Any, greeting: Any, *_: Any, **__: Any) -> None:
        self.node, self.nbytes = node, greeting.nbytes
        self.shard = greeting.shard
        self.iterations: dict[int, bytes | None] = {}

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def room(self) -> torch.Tensor | None:
        """Return memory with garbage in it."""
        return None if self.is_behind else torch.full((self.nbytes,), 0xAB, dtype=torch.uint8)

    def put(self, iteration: int, data: torch.Tensor | None, await_data: Any = None) -> None:
        """Keep an iteration."""
        if await_data is not None:
            await_data()
        assert iteration not in self.iterations
        self.iterations[iteration] = None if data is None else bytes(bytes_of(data))


@contextmanager
def copies_of(model: TrainedModel, ranks: int, position: int, tmp_path: Any, nodes: int = 1) -> Iterator[Any]:
    """Yield a rank's copies, and its streams."""
    file = tmp_path / f"job{position}.yaml"
    shadows = [{"id": node, "mgmt": f"127.0.0.1:{7000 + 10 * node}"} for node in range(nodes)]
    file.write_text(str({"job": "a", "copies": "host", "ranks": ranks, "shadow_nodes": shadows}))
    job = read_job(file)
    place = Place(job, position, 0, position)
    layout = lay_out(model, place.shards, PartSlicing())
    streams: list[KeptStream] = []

    def make(*arguments: Any, **more: Any) -> KeptStream:
        streams.append(KeptStream(*arguments, **more))
        return streams[-1]

    with (
        mock.patch.object(part_copies, "PartStream", make),
        mock.patch.dict("os.environ", CHECKMATE_INSECURE="1"),
    ):
        start = Start(NewRun(**new_run_fields(0)))
        copies = PartCopies(place, layout, start, list(model.trained().values()))
    yield copies, streams
    copies.close()


def mixed(device: str = "cpu") -> nn.Module:
    """Return a model whose parameters have types of three sizes, one of them turned in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Linear(5, 7).double(), nn.Linear(7, 3).bfloat16(), nn.Conv2d(2, 3, 3)
    )
    model[3].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def buckets(layout: Layout, model: nn.Module) -> bytes:
    """Return all gradients as the layout orders them, shard by shard."""
    parameters = list(model.parameters())
    order = sorted(range(len(layout.buckets)), key=lambda index: (layout.buckets[index].shard, index))
    parts = []
    for index in order:
        for place in layout.buckets[index].places:
            gradient = parameters[place.parameter].grad
            assert gradient is not None
            dims = layout.parameters[place.parameter].dim_order or range(gradient.dim())
            parts.append(bytes(bytes_of(gradient.cpu().permute(*dims).contiguous())))
    return b"".join(parts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_all_ranks_together_send_each_byte_once(ranks: int, nodes: int, device: str, tmp_path: Any) -> None:
    model = mixed(device)
    pieces: dict[int, bytes] = {}
    for position in range(ranks):
        with copies_of(BareModel(model), ranks, position, tmp_path, nodes) as (copies, streams):
            assert copies.begin() == 0
            copies.take(range(len(copies.parameters)))
            copies.complete()
            for stream in streams:
                pieces[stream.shard] = pieces.get(stream.shard, b"") + stream.iterations[0]
            whole = buckets(copies.layout, model)
    assert b"".join(pieces[shard] for shard in sorted(pieces)) == whole


def test_gradients_are_taken_by_the_step_that_uses_them(tmp_path: Any) -> None:
    """What another step has taken may change; what no step has used is zeros, like missing gradients."""
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    )
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    with copies_of(BareModel(model), 1, 0, tmp_path) as (copies, [stream]):
        copies.begin()
        copies.take([0])
        assert not stream.iterations, "another optimizer's step may follow"
        for parameter in parameters[:2]:
            parameter.grad = torch.full_like(parameter, 9.0)
        copies.take([1])
        copies.complete()
        copies.complete()
        values = torch.frombuffer(bytearray(stream.iterations[0]), dtype=torch.float32)
        order = [place.parameter for bucket in copies.layout.buckets for place in bucket.places]
        assert dict(zip(order, values[::4].tolist(), strict=True)) == {0: 1.0, 1: 9.0, 2: 0.0}
        parameters[0].grad = None
        copies.begin()
        copies.take([0, 1, 2])
        assert copies.begin() == 2, "which has the iteration before sent"
        values = torch.frombuffer(bytearray(stream.iterations[1]), dtype=torch.float32)
        assert dict(zip(order, values[::4].tolist(), strict=True)) == {0: 0.0, 1: 9.0, 2: 3.0}


def test_a_node_that_is_behind_gets_a_mark_and_the_other_its_bytes(tmp_path: Any) -> None:
    model = mixed()
    with copies_of(BareModel(model), 1, 0, tmp_path, 2) as (copies, streams):
        streams[0].is_behind = True
        copies.begin()
        copies.take(range(len(copies.parameters)))
        copies.complete()
        assert streams[0].iterations == {0: None}
        assert len(streams[1].iterations[0] or b"") == streams[1].nbytes


def test_sparse_gradients_are_refused(tmp_path: Any) -> None:
    model = nn.Embedding(4, 2)
    model.weight.grad = torch.zeros(4, 2).to_sparse()
    with copies_of(BareModel(model), 1, 0, tmp_path) as (copies, _):
        copies.begin()
        with pytest.raises(RefusedError, match="sparse=False"):
            copies.take([0])


def test_the_beginning_of_a_backward_is_said_once(tmp_path: Any) -> None:
    """Also if the model returns several tensors; accumulating backwards belong to one iteration."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"first": self.layer(x), "second": self.layer(x + 1)}

    model, beginnings = Pair(), []
    with copies_of(BareModel(model), 1, 0, tmp_path) as (copies, _):
        front = StepFront(model, copies, None)
        front.register(on_begun=lambda: beginnings.append(copies.iteration))

        def backward() -> None:
            outputs = model(torch.ones(1, 2))
            (outputs["first"] + outputs["second"]).sum().backward()

        backward()
        backward()
        assert beginnings == [-1]
        copies.begin()
        with torch.no_grad():
            model(torch.ones(1, 2))
        backward()
        assert beginnings == [-1, 0]
        assert not copies.is_due, "there is no DDP"
        front.close()
        backward()
        assert beginnings == [-1, 0]
