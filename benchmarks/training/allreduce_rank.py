"""One rank of `benchmarks.training.allreduce` and `trees`: it times AllReduces, and prints JSON.

python -m benchmarks.training.allreduce_rank --rank 0 --ips 10.0.0.1 10.0.0.2 --interface nic0 \\
    --kib 8192 --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from checkmate.ring.connections import Ring, connect_ring
from checkmate.ring.place import RingError, RingPlace
from checkmate.state import dtype_name
from checkmate.tagger import Tagger
from checkmate.training.gradients.ring_reducer import RingReducer
from checkmate.tree.connections import Tree, connect_tree
from checkmate.wire.layout import make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.ring_sockets import TREE_PORT
from checkmate.wire.schedule import RING_SLICING, side_of
from checkmate.wire.tag import CHANNELS_MAX
from checkmate.wire.tree import TREE_BYTES_MAX, TreeSlicing

MAINS = ("idle", "busy")
"""The main thread meanwhile: it waits, or spins in Python."""
CONTROL = "ring again"
TAGGED_PORT = 44000
_SAMPLE_BYTES, _MAX_IN_A_ROW = 64 << 20, 8
"""Smaller tensors are reduced several times in a row, because the scheduling of a single one is random."""
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ips", nargs="+", required=True, help="one per rank, in ring order")
    parser.add_argument("--interface", required=True, help="interface with this rank's address")
    parser.add_argument("--kib", type=int, nargs="+", required=True, help="sizes of the tensor")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions for each size and kind")
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--trees", action="store_true", help="also time trees, and the ring a second time")
    parser.add_argument("--tagged", action="store_true", help="also time tagged ones")
    parser.add_argument("--mains", nargs="+", choices=MAINS, default=MAINS, help="the main thread meanwhile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share one machine
    algorithm = same_congestion_control()
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    ranks = len(arguments.ips)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{arguments.ips[0]}:46000", rank=arguments.rank, world_size=ranks
    )
    place = RingPlace(arguments.rank, arguments.ips, arguments.channels)
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(connect_ring(place, timeout=_SECONDS))
        networks: dict[str, tuple[Ring, Tree | None]] = {"ring": (ring, None)}
        if arguments.trees:
            beside = replace(place, port=TREE_PORT)
            networks["tree"] = ring, stack.enter_context(connect_tree(beside, timeout=_SECONDS))
            networks[CONTROL] = ring, None
        if arguments.tagged:
            tags = side_of(ranks, arguments.rank) is not None
            tagger = stack.enter_context(Tagger.attach()) if tags else None
            tagged = connect_ring(replace(place, port=TAGGED_PORT), tagger, _SECONDS)
            networks["tagged ring"] = stack.enter_context(tagged), None
            beside = replace(place, port=TAGGED_PORT + CHANNELS_MAX)
            networks["tagged tree"] = ring, stack.enter_context(connect_tree(beside, tagger, _SECONDS))
        for sender in (
            s for pair in networks.values() for network in pair if network for s in network.senders
        ):
            sender.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
        seconds = {
            kib: timings(networks, kib << 10, arguments.rounds, arguments.mains) for kib in arguments.kib
        }
        ring.barrier()
    json.dump({"congestion_control": algorithm, "seconds": seconds}, sys.stdout)
    dist.destroy_process_group()
    return 0


def same_congestion_control() -> str:
    """Set and return the congestion control of gloo's sockets: loss-based like the ring's, if allowed."""
    for algorithm in ("cubic", "reno"):
        with contextlib.suppress(PermissionError):  # only algorithms in tcp_allowed_congestion_control
            _CONTROL.write_text(algorithm)
            break
    return _CONTROL.read_text().strip()


def timings(
    networks: Mapping[str, tuple[Ring, Tree | None]], nbytes: int, rounds: int, mains: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each AllReduce by main thread and implementation, without the first ones."""
    times = min(max(1, _SAMPLE_BYTES // nbytes), _MAX_IN_A_ROW)
    tensor = torch.zeros(nbytes // 4)
    with contextlib.ExitStack() as stack:
        starts = {"gloo": gloo_reduce(tensor)}
        for name, (ring, tree) in networks.items():
            again = name == CONTROL
            reduce = starts["ring"] if again else stack.enter_context(our_reduce(ring, tree, tensor))
            starts[name] = reduce
        turns = list(starts.items())
        samples: dict[str, dict[str, list[float]]] = {main: {name: [] for name, _ in turns} for main in mains}
        for number in range(rounds + 1):
            for main in mains:
                for implementation, start in turns if number % 2 else reversed(turns):
                    tensor.fill_(1.0)
                    seconds = time_reductions(start, times, busy=main == "busy")
                    factor = dist.get_world_size() if implementation == "gloo" else 1
                    if not bool((tensor == float(factor) ** times).all()):
                        raise SystemExit(f"{implementation} reduced wrongly")
                    if number:
                        samples[main][implementation].append(seconds / times)
    return samples


def time_reductions(start: Callable[[], Callable[[bool], bool]], times: int, *, busy: bool) -> float:
    """Return the seconds from a barrier until this rank has the last of `times` results, in turn."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        finish = start()
        if busy:
            count = 0
            while not finish(False):
                for step in range(1000):
                    count += step
        finish(True)
    return time.perf_counter() - begin


def gloo_reduce(tensor: torch.Tensor) -> Callable[[], Callable[[bool], bool]]:
    """Return a function that starts gloo's AllReduce of the tensor.

    It returns a function that tests whether it is done, or waits for that.
    """

    def start() -> Callable[[bool], bool]:
        work = dist.all_reduce(tensor, async_op=True)
        return lambda wait: bool(work.wait() if wait else work.is_completed())

    return start


@contextlib.contextmanager
def our_reduce(
    ring: Ring, tree: Tree | None, tensor: torch.Tensor
) -> Iterator[Callable[[], Callable[[bool], bool]]]:
    """Yield the same function for the AllReduce of the ring, or of trees."""
    finished = threading.Event()
    errors: list[RingError] = []

    def fail(error: RingError) -> None:
        errors.append(error)
        finished.set()

    def start() -> Callable[[bool], bool]:
        finished.clear()
        reducer.submit(0)
        return finish

    def finish(wait: bool) -> bool:
        is_finished = finished.wait(_SECONDS) if wait else finished.is_set()
        if errors:
            raise errors[0]
        return is_finished

    slicing = RING_SLICING if tree is None else TreeSlicing(TREE_BYTES_MAX)
    parameter = Parameter("", (len(tensor),), dtype_name(tensor.dtype))
    reducer = RingReducer(ring, make_layout([parameter], 1, slicing=slicing), tree)
    reducer.tensors = [tensor]
    reducer.open(lambda _: finished.set(), fail)
    try:
        yield start
    finally:
        reducer.close()


if __name__ == "__main__":
    sys.exit(main())
