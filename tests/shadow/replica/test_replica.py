"""Replicas against the trainers' own optimizer: equal bits after every step, however it is cut."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkmate.optim.supported import SUPPORTED, options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica import blocks
from checkmate.shadow.replica.replica import IterationGone, NotStepped, Replica, ReplicaError
from checkmate.state import dtype_name
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from tests.support.shadow.replicas import bytes_of_replica, iteration_of
from tests.support.training.optimizer_steps import (
    MAKERS,
    State,
    Trainer,
    assert_same,
    buckets_of,
    copied,
    follow,
    read,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce limits so that small parameters are cut into pieces, too."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", (512, 512))


FLAGS: dict[str, dict[str, Any]] = {"neither": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("shards", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_step_gives_the_trainers_bits(kind: str, flags: str, shards: int) -> None:
    """Warm-up and decay, clipping, missing gradients, a skipped step."""
    trainer = Trainer(lambda groups: MAKERS[kind](groups, **FLAGS[flags]), shards=shards)
    replicas = [trainer.replica(shard) for shard in range(shards)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        trainer.optimizer, 0.1, total_steps=20, cycle_momentum=False
    )
    for iteration in range(10):
        gradients = trainer.backward(without={2, 5} if iteration in (3, 7) else set())
        if iteration % 2:
            clip(trainer, 5.0)
        trainer.step.skipped = iteration == 5
        follow(trainer, replicas, gradients)
        schedule.step()


def clip(trainer: Trainer, most: float) -> None:
    """Record a scaling like `checkmate.clip_grad_norm_`."""
    norm = torch.nn.utils.clip_grad_norm_(trainer.parameters, most)
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    assert factor < 1
    trainer.step.scalings.add(kind=pb.Scaling.CLIP, factor=factor.item(), dtype=dtype_name(factor.dtype))


MOMENTUM = ("torch.optim.SGD", "torch.optim.RMSprop")
DEEP: list[tuple[int, ...]] = [
    (40, 30),
    (13, 5, 3, 3),
    (7,),
    (6, 4, 2, 3, 3),
    (36, 36),
    (36, 36),
    (3, 1, 1),
    (0, 4),
]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_parameters_in_any_memory_format(name: str, flags: str, dtype: torch.dtype) -> None:
    """Some row-major, some not: matrices, a convolution's weights of two and of three dimensions."""
    kind: Any = SUPPORTED[name]
    options = {**({"momentum": 0.9} if name in MOMENTUM else {}), **FLAGS[flags]}
    if flags == "fused" and "fused" not in inspect.signature(kind).parameters:
        pytest.skip("torch has no fused step of it")
    if flags == "fused" and name == "torch.optim.SGD" and dtype == torch.bfloat16:
        pytest.skip("refused, see spec_of")
    trainer = Trainer(lambda groups: kind(groups, **options), shapes=DEEP, dtypes=(dtype,), turned=True)
    replicas = [trainer.replica(shard) for shard in range(2)]
    for iteration in range(6):
        gradients = trainer.backward(without={3} if iteration == 4 and flags != "fused" else set())
        clip(trainer, 3.0)
        follow(trainer, replicas, gradients)


@pytest.mark.parametrize("foreach", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", sorted(set(SUPPORTED) - {"torch.optim.SGD", "torch.optim.Adam"}))
def test_every_other_optimizer_follows_too(name: str, foreach: bool) -> None:
    kind: Any = SUPPORTED[name]
    trainer = Trainer(
        lambda groups: (
            kind(groups, foreach=foreach, weight_decay=0.01)
            if name != "torch.optim.Rprop"
            else kind(groups, foreach=foreach)
        )
    )
    replicas = [trainer.replica(shard) for shard in range(2)]
    for iteration in range(8):
        follow(trainer, replicas, trainer.backward(without={3} if iteration == 4 else set()))


def test_momentum_and_centring_of_rmsprop() -> None:
    trainer = Trainer(lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True))
    replicas = [trainer.replica(shard) for shard in range(2)]
    for _ in range(5):
        follow(trainer, replicas, trainer.backward())


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16,), (torch.float64,), (torch.float32, torch.bfloat16), (torch.float16,)],
    ids=str,
)
def test_other_types(dtypes: tuple[torch.dtype, ...], flags: str) -> None:
    trainer = Trainer(lambda groups: torch.optim.AdamW(groups, lr=0.01, **FLAGS[flags]), dtypes=dtypes)
    replicas = [trainer.replica(shard) for shard in range(2)]
    for _ in range(5):
        gradients = trainer.backward()
        clip(trainer, 3.0)
        follow(trainer, replicas, gradients)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_grad_scaler(flags: str, unscaled_first: bool) -> None:
    """Unscaled by the scaler, by the fused step, or before clipping; and a skipped step."""
    trainer = Trainer(lambda groups: torch.optim.Adam(groups, lr=0.01, **FLAGS[flags]))
    replicas = [trainer.replica(shard) for shard in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for iteration in range(6):
        gradients = trainer.backward()
        scale = scaler.get_scale()
        scaler.scale(torch.ones(()))
        if iteration == 3:
            trainer.parameters[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        options = [options_of(group) for group in trainer.optimizer.param_groups]
        fused = flags == "fused" and not unscaled_first
        if fused:
            trainer.step.scalings.add(kind=pb.Scaling.FUSED, factor=scale)
        else:
            inverse = torch.tensor(scale).double().reciprocal().float().item()
            trainer.step.scalings.add(kind=pb.Scaling.UNSCALE, factor=inverse)
        if unscaled_first:
            scaler.unscale_(trainer.optimizer)
            if iteration != 3:
                clip(trainer, 0.01)
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.step.skipped = iteration == 3
        trainer.step.options.extend(options)
        for replica in replicas:
            assert replica.step(iteration, buckets_of(gradients, replica), trainer.step) == []
            assert_same(read(replica, iteration), trainer.state(), replica.numbers)


def test_clipping_some_parameters() -> None:
    trainer = Trainer(lambda groups: torch.optim.SGD(groups, lr=0.1))
    replicas = [trainer.replica(shard) for shard in range(2)]
    for _ in range(3):
        gradients = trainer.backward()
        clip(trainer, 0.5)
        clipped = [trainer.parameters[i] for i in (0, 4)]
        norm = torch.nn.utils.clip_grad_norm_(clipped, 1e-3)
        factor = torch.clamp(1e-3 / (norm + 1e-6), max=1.0)
        trainer.step.scalings.add(kind=pb.Scaling.CLIP, factor=factor.item(), parameters=[0, 4])
        follow(trainer, replicas, gradients)


@pytest.mark.parametrize("flags", ["neither", "fused"])  # torch's foreach takes none
def test_a_learning_rate_that_is_a_tensor(flags: str) -> None:
    trainer = Trainer(lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), **FLAGS[flags]))
    replicas = [trainer.replica(shard) for shard in range(2)]
    for _ in range(4):
        follow(trainer, replicas, trainer.backward())
        for group in trainer.optimizer.param_groups:
            group["lr"].mul_(0.7)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


BIG: list[tuple[int, ...]] = [(1000, 701), (333, 777), (5,), (100_003,)]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd-nesterov", marks=pytest.mark.slow)])
def test_on_any_number_of_threads(
    kind: str, flags: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters large enough for torch to use several threads."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", (1 << 18, 1 << 18))
    trainer = Trainer(lambda g: MAKERS[kind](g, **FLAGS[flags]), shapes=BIG)
    replicas = [trainer.replica(shard) for shard in range(2)]
    for count in (1, 2, 3, 4):
        gradients = trainer.backward()
        threads(count)
        step = trainer.update()
        threads(5 - count)
        for replica in replicas:
            assert replica.step(trainer.iteration, buckets_of(gradients, replica), step) == []
            assert_same(read(replica, trainer.iteration), trainer.state(), replica.numbers)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.bfloat16, 3),
        pytest.param(torch.bfloat16, 1, marks=pytest.mark.slow),
        pytest.param(torch.float16, 1, marks=pytest.mark.slow),
        pytest.param(torch.float16, 3, marks=pytest.mark.slow),
    ],
)
def test_16_bits_are_stepped_with_as_many_threads_as_in_training(
    count: int,
    dtype: torch.dtype,
    flags: str,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own bits of these types depend on the number of threads."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", (1 << 16, 1 << 16))
    kind = "adam" if flags == "fused" else "sgd-momentum"
    threads(count)
    trainer = Trainer(lambda g: MAKERS[kind](g, **FLAGS[flags]), shapes=BIG, dtypes=(dtype,))
    threads(2)
    replicas = [trainer.replica(shard) for shard in range(2)]
    for _ in range(3):
        gradients = trainer.backward()
        threads(count)
        step = trainer.update()
        threads(2)
        for replica in replicas:
            assert replica.step(trainer.iteration, buckets_of(gradients, replica), step) == []
            assert_same(read(replica, trainer.iteration), trainer.state(), replica.numbers)
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("kind", ["sgd-momentum", "adam"])
@pytest.mark.parametrize("flags", FLAGS)
def test_joining_parameter_by_parameter(kind: str, flags: str) -> None:
    """Loaded parameters step; those loaded between two steps join at the next one."""
    trainer = Trainer(lambda groups: MAKERS[kind](groups, **FLAGS[flags]), shards=1)
    follow(trainer, [], trainer.backward())
    replica = trainer.replica(0, seeded=False)
    assert iteration_of(replica) is None
    waiting = list(replica.numbers)
    while waiting:
        trainer.seed(replica, waiting[:3])
        waiting = waiting[3:]
        gradients = trainer.backward()
        step = trainer.update()
        assert replica.step(trainer.iteration, buckets_of(gradients, replica), step) == []
        there = [n for n in replica.numbers if n not in waiting]
        assert {n: replica.at.get(n) for n in there} == dict.fromkeys(there, trainer.iteration)
        assert_same(read(replica, trainer.iteration, tuple(there)), trainer.state(), there)
        assert (iteration_of(replica) is None) == bool(waiting)
    follow(trainer, [replica], trainer.backward())


def test_a_late_parameter_steps_alone_with_gradients_that_are_still_there() -> None:
    trainer = Trainer(MAKERS["sgd-momentum"], shards=1)
    replica = trainer.replica(0)
    missing = replica.numbers[2]
    before = trainer.state()
    gradients = trainer.backward()
    clip(trainer, 0.5)
    step = trainer.update()
    del replica.at[missing]
    buckets = buckets_of(gradients, replica)
    assert replica.step(0, buckets, step) == []
    assert iteration_of(replica) is None
    replica.load(missing, *before[missing], -1)
    assert replica.step(0, buckets, step) == []  # the others have stepped, and their gradients are scaled
    assert_same(read(replica, 0), trainer.state(), replica.numbers)


def test_what_is_read_stays_when_a_replica_is_cleared() -> None:
    trainer = Trainer(MAKERS["adam"], shards=1)
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())
    before = trainer.state()
    reading = replica.read(0)
    parameters = {number: (tensor.clone(), state) for number, tensor, state in itertools.islice(reading, 1)}
    replica.clear()
    trainer.backward()
    trainer.update()
    trainer.seed(replica, list(replica.numbers))
    parameters |= {number: (tensor.clone(), state) for number, tensor, state in reading}
    assert_same(parameters, before, replica.numbers)


def test_what_trainers_on_another_device_have_is_stepped_on_all_threads() -> None:
    trainer = Trainer(MAKERS["sgd"], shards=1, dtypes=(torch.bfloat16,))
    replica = trainer.replica(0, exact=False)
    gradients, thread_counts = trainer.backward(), set()
    step = trainer.update()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    watch = register_optimizer_step_pre_hook(lambda *_: thread_counts.add(torch.get_num_threads()))
    try:
        replica.step(trainer.iteration, buckets_of(gradients, replica), step)
    finally:
        watch.remove()
        torch.set_num_threads(before)
    assert thread_counts == {2}


@pytest.mark.parametrize("skipped", [False, True])
def test_a_reserved_iteration_is_read_after_newer_steps(skipped: bool) -> None:
    trainer = Trainer(MAKERS["adam"])
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())
    assert replica.reserve(2)
    for _ in range(2):
        follow(trainer, [replica], trainer.backward())
    expected = trainer.state()
    plain = bytes_of_replica(replica)
    reading = replica.read(2)
    first = next(reading)  # being read while the next steps come
    gradients = trainer.backward()
    trainer.step.skipped = skipped
    follow(trainer, [replica], gradients)
    follow(trainer, [replica], trainer.backward())
    assert bytes_of_replica(replica) > plain
    parameters = {n: (t.clone(), copied(s)) for n, t, s in itertools.chain([first], reading)}
    assert_same(parameters, expected, replica.numbers)
    with pytest.raises(IterationGone, match="beyond iteration 2"):
        read(replica, 2)  # reserved for one reader
    assert bytes_of_replica(replica) == plain
    replica.release(2)
    replica.release(2)
    assert not replica.reserve(2)
    follow(trainer, [replica], trainer.backward())
    assert bytes_of_replica(replica) == plain


def test_a_released_iteration_costs_nothing_more() -> None:
    trainer = Trainer(MAKERS["adam"])
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())
    plain = bytes_of_replica(replica)
    for _ in range(2):
        assert replica.reserve(trainer.iteration)
    follow(trainer, [replica], trainer.backward())
    assert 2 * plain <= bytes_of_replica(replica) < 2.01 * plain
    for reserved in (True, False):
        replica.release(0)
        assert (bytes_of_replica(replica) > plain) == reserved
    with pytest.raises(IterationGone):
        replica.read(0)


def test_a_reader_that_gives_up_leaves_nothing() -> None:
    trainer = Trainer(MAKERS["adam"])
    replica = trainer.replica(0)
    follow(trainer, [replica], trainer.backward())
    plain = bytes_of_replica(replica)
    reader = replica.read(0)
    next(reader)
    follow(trainer, [replica], trainer.backward())
    assert bytes_of_replica(replica) > plain
    reader.close()  # type: ignore[attr-defined]
    assert bytes_of_replica(replica) == plain
    with pytest.raises(IterationGone):
        replica.read(0)
    late = replica.read(1)
    follow(trainer, [replica], trainer.backward())
    with pytest.raises(IterationGone):
        next(late)


def test_what_is_not_there_yet_is_said() -> None:
    trainer = Trainer(MAKERS["adam"])
    replica = trainer.replica(0, seeded=False)
    with pytest.raises(NotStepped, match="layer.* is not at iteration -1 yet"):
        replica.read(-1)
    trainer.seed(replica, replica.numbers)
    with pytest.raises(NotStepped, match="not at iteration 0"):
        replica.read(0)
    with pytest.raises(NotStepped, match="shard 0 has no parameter 99"):
        replica.read(-1, (99,))


def test_readers_beside_steps_see_whole_iterations() -> None:
    """Threads that read the current state during steps never see a mixture of two iterations."""
    trainer = Trainer(MAKERS["adam"], shards=1)
    replica = trainer.replica(0)
    right: dict[int, State] = {}
    wrong: list[str] = []
    complete = SharedCounter()
    end = threading.Event()

    def reader() -> None:
        while not end.is_set():
            iteration = replica.at[replica.numbers[0]]
            if not replica.reserve(iteration):
                continue
            try:
                parameters = read(replica, iteration)
            except (IterationGone, NotStepped):
                continue  # it stepped between, or two readers shared a reservation
            finally:
                replica.release(iteration)
            try:
                assert_same(parameters, right[iteration], replica.numbers)
                complete.add()
            except AssertionError as error:
                wrong.append(str(error))

    right[-1] = trainer.state()
    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            gradients = trainer.backward()
            step = trainer.update()
            right[trainer.iteration] = trainer.state()
            assert replica.step(trainer.iteration, buckets_of(gradients, replica), step) == []
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert complete.count > 2
    assert_same(read(replica, trainer.iteration), trainer.state(), replica.numbers)


class SharedCounter:
    """A counter that threads share."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


def _faults() -> Iterator[tuple[str, Callable[[Trainer, Replica, dict[int, torch.Tensor], pb.Step], object]]]:
    yield "bucket .* is missing", lambda t, r, g, s: g.clear()
    yield "another size", lambda t, r, g, s: g.update({i: v[:-1] for i, v in g.items()})
    yield "another size or type", lambda t, r, g, s: g.update({i: v.double() for i, v in g.items()})
    yield "3 parameter groups, the optimizer has 2", lambda t, r, g, s: s.options.append("{}")
    yield "not a parameter group's options", lambda t, r, g, s: s.options.__setitem__(0, "?")
    yield "unknown scaling", lambda t, r, g, s: s.scalings.add(dtype="int8")


@pytest.mark.parametrize(
    ("words", "spoil"), list(_faults()), ids=["none", "short", "type", "groups", "options", "scaling"]
)
def test_a_record_that_does_not_fit_changes_nothing(words: str, spoil: Any) -> None:
    trainer = Trainer(MAKERS["adam"])
    replica = trainer.replica(0)
    before = read(replica, -1)
    gradients = trainer.backward()
    step = trainer.update()
    spoiled, record = buckets_of(gradients, replica), pb.Step.FromString(step.SerializeToString())
    spoil(trainer, replica, spoiled, record)
    with pytest.raises(ValueError, match=words):
        replica.step(0, spoiled, record)
    assert_same(read(replica, -1), before, replica.numbers)
    assert replica.step(0, buckets_of(gradients, replica), step) == []
    assert_same(read(replica, 0), trainer.state(), replica.numbers)


def test_seeds_that_do_not_fit_are_refused() -> None:
    trainer = Trainer(MAKERS["adam"])
    replica = trainer.replica(0)
    number = replica.numbers[0]
    with pytest.raises(ReplicaError, match="shard 0 has no parameter 99"):
        replica.load(99, torch.zeros(1), {}, 0)
    with pytest.raises(ReplicaError, match="has shape .* but its seed has"):
        replica.load(number, torch.zeros(1, 1, 1, 1), {}, 0)
    with pytest.raises(ReplicaError, match="and type float32, but its seed has .* float64"):
        replica.load(number, trainer.parameters[number].detach().double(), {}, 0)


def test_state_with_numbers_and_none() -> None:
    """Older torch versions or `load_state_dict` leave momentum that is None."""
    trainer = Trainer(MAKERS["sgd-momentum"], shards=1)
    for parameter in trainer.parameters:
        trainer.optimizer.state[parameter]["momentum_buffer"] = None
    replica = trainer.replica(0)
    assert_same(read(replica, -1), trainer.state(), replica.numbers)
    follow(trainer, [replica], trainer.backward())


@pytest.mark.parametrize("flags", ["neither", "foreach"])
def test_momentum_that_begins_later(flags: str) -> None:
    trainer = Trainer(lambda groups: torch.optim.SGD(groups, lr=0.1, **FLAGS[flags]), shards=1)
    replica = trainer.replica(0)
    for momentum in (0.0, 0.0, 0.9, 0.8):
        for group in trainer.optimizer.param_groups:
            group["momentum"] = momentum
        follow(trainer, [replica], trainer.backward())


def test_a_parameter_that_the_optimizer_does_not_have() -> None:
    trainer = Trainer(lambda groups: torch.optim.Adam(groups[:1], lr=0.1), shards=1)
    replica = trainer.replica(0)
    assert replica.reserve(0)
    assert replica.reserve(0)
    for _ in range(3):
        follow(trainer, [replica], trainer.backward())
    read(replica, 0)


@settings(max_examples=20)
@given(st.data())
def test_any_model_any_cut(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 30), max_size=3).map(tuple), min_size=1, max_size=8))
    kind = data.draw(st.sampled_from(sorted(MAKERS)))
    flags = FLAGS[data.draw(st.sampled_from(sorted(FLAGS)))]
    shards = data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        size = data.draw(st.integers(64, 1500))
        patch.setattr(blocks, "BLOCK_ELEMENTS", (size, size))
        trainer = Trainer(
            lambda groups: MAKERS[kind](groups, **flags),
            shapes=shapes,
            shards=shards,
            groups=data.draw(st.integers(1, min(3, len(shapes)))),
            bucket_bytes=data.draw(st.integers(1, 20000)),
        )
        replicas = [trainer.replica(s) for s in range(shards) if trainer.layout.of_shard(s)]
        for _ in range(data.draw(st.integers(1, 4))):
            without = data.draw(st.sets(st.integers(0, len(shapes) - 1), max_size=2))
            if kind.startswith("sgd") and "fused" in flags:
                without = set()  # torch itself fails if only some have momentum
            follow(trainer, replicas, trainer.backward(without))


@given(st.lists(st.integers(1, 1 << 30), max_size=20))
def test_blocks_are_cut_at_whole_vectors(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ELEMENTS", (1 << 16, 1 << 22))
        size = blocks.block_elements(Parameter("w", (n,), "float32") for n in sizes)
    assert 1 << 16 <= size <= 1 << 22
    assert size % 64 == 0


def test_an_empty_shard_is_none_to_step() -> None:
    layout: Layout = make_layout([Parameter("w", (3,), "float32")], 3)
    spec = pb.OptimizerSpec(name="torch.optim.SGD")
    empty = [Replica(layout, s, spec, exact=True) for s in range(3) if not layout.of_shard(s)]
    assert len(empty) == 2
    assert empty[0].step(0, {}, pb.Step()) == []
    assert list(empty[0].read(0)) == []
