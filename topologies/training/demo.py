"""The demo: training loses ranks to kill -9, and ends bit-identical to an uninterrupted run.

A small GPT trains twice with the same seed, on four ranks, in two labs. One run is undisturbed, over the same
ring without tags and shadow nodes. The other is protected by Checkmate, and loses a rank twice: torchrun
restarts all ranks; then, after all hosts have failed at once, `checkmate launch` starts the dead rank alone.
They take turns, so that their iteration times are comparable. `make demo` runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from checkmate.output.consoles import text_console
from checkmate.output.standard_streams import use_plain_streams
from topologies import lab, picture
from topologies.describe import topology as describe
from topologies.describe.job_files import TARGETS, Target, target_of
from topologies.describe.topology import LabError, Topology
from topologies.progress import StepProgress
from topologies.signals import unwinding
from topologies.training import report
from topologies.training.job import JobPlan, TrainingJob, start_all, take_turns, training_lab
from topologies.training.orders import PHASES, Kill
from topologies.training.record import JobRecord
from topologies.training.verdict import Cost, Promise, cost, promises

_BLOCK: Final = 5
_END_SECONDS: Final = 180.0


@dataclass(frozen=True)
class Story:
    """The plan of a demo."""

    topology: Topology
    target: Target
    iterations: int
    kill: Kill
    """With a restart of all ranks, in the first half."""
    kill_in_place: Kill
    """With recovery in place, in the second half."""
    out: Path

    @property
    def half(self) -> int:
        """The iteration before which all hosts of the protected run fail."""
        return half_of(self.iterations)


def half_of(iterations: int) -> int:
    """Return the first iteration of the second half, which begins with a block."""
    return _BLOCK * (iterations // (2 * _BLOCK))


@dataclass(frozen=True)
class Ending:
    """The outcome of a demo."""

    reference: JobRecord
    protected: JobRecord
    promises: tuple[Promise, ...]
    cost: Cost
    picture: Path

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return all(promise.is_kept for promise in self.promises)

    def data(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        recoveries = [asdict(recovery) for recovery in self.protected.recoveries()]
        return {
            "good": self.good,
            "promises": [
                {"what": promise.text, "kept": promise.is_kept, "seen": promise.observation}
                for promise in self.promises
            ],
            "recoveries": recoveries,
            "cost": {"seconds": self.cost.seconds.data(), "processor": self.cost.processor.data()},
            "losses": {"uninterrupted": self.reference.curve, "protected": self.protected.curve},
            "picture": str(self.picture),
        }


def perform(story: Story, console: Console) -> Ending:
    """Run the whole demo and remove its labs; raise `LabError` on failure."""
    console.print(f"lab {story.topology.name}, twice: {story.topology.title}\n", highlight=False)
    picture.show(story.topology, console)
    console.print()
    with unwinding(), StepProgress(console) as steps, contextlib.ExitStack() as labs:
        arguments = ("--iterations", str(story.iterations))
        plans = {
            "uninterrupted": JobPlan(arguments, reduce="untagged", gated=True),
            "protected": JobPlan(arguments, kills=(story.kill, story.kill_in_place), gated=True),
        }
        reference, protected = (
            labs.enter_context(
                training_lab(story.topology, story.target, f"demo_{name}", plan, story.out / name, steps)
            )
            for name, plan in plans.items()
        )
        steps(f"torchrun starts {len(story.topology.ranks)} ranks in each")
        start_all((reference, protected))
        _train(story, reference, protected, steps)
        steps("checkmate consolidate, from the shadow nodes")
        states: dict[str, object] = {
            "the uninterrupted run": reference.state(),
            "the protected run": protected.state(),
            "its shadow nodes": protected.consolidated(story.iterations - 1),
        }
        records = reference.record(), protected.record()
    return _ending(story, *records, states)


def _train(story: Story, reference: TrainingJob, protected: TrainingJob, steps: StepProgress) -> None:
    def tick(completed: int) -> None:
        loss = protected.record().curve[completed - 1]
        steps.advanced(
            completed, story.iterations, f"iteration {completed} of {story.iterations}, loss {loss:.3f}"
        )

    both, half = (reference, protected), story.half
    steps(f"both train in turns; kill -9 of {_described(story.kill)}: torchrun restarts all ranks")
    take_turns(both, range(0, half, _BLOCK), tick)
    steps(f"all hosts of the protected run fail before iteration {half}; checkmate launch starts the ranks")
    protected.kill_ranks()
    protected.start("launch")
    protected.await_ready(_END_SECONDS)
    steps(f"both train in turns; kill -9 of {_described(story.kill_in_place)}: the others go on")
    take_turns(both, range(half, story.iterations, _BLOCK), tick)
    for training in (reference, protected):
        training.finish(_END_SECONDS)


def _described(kill: Kill) -> str:
    return f"rank {kill.rank} in iteration {kill.iteration}"


def _ending(story: Story, reference: JobRecord, protected: JobRecord, states: dict[str, object]) -> Ending:
    file = story.out / "losses.png"
    report.draw_losses(file, reference.curve, protected.curve, protected.recoveries())
    return Ending(
        reference,
        protected,
        tuple(promises(reference, protected, story.iterations, 2, states)),
        cost(reference, protected, story.iterations, _BLOCK),
        file,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m topologies.training.demo",
        description=__doc__,
        epilog="example: python -m topologies.training.demo --kill 3:10:forward --iterations 60",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="softswitch", help=", ".join(TARGETS))
    parser.add_argument("--iterations", type=int, default=50, help="at least 20 (default: 50)")
    for option, default, words in (
        ("--kill", "2:13:all-gather", "a rank to kill in the first half, after which all are restarted"),
        ("--kill-in-place", "1:38:reduce-scatter", "a rank to kill in the second half, started alone"),
    ):
        parser.add_argument(
            option,
            default=default,
            metavar="RANK:ITERATION:PHASE",
            help=f"{words} (default: {default}); phases: {', '.join(PHASES)}",
        )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the plot and logs")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    return parser


def _story(options: argparse.Namespace) -> Story:
    topology = describe.load("single_tor")
    iterations = options.iterations
    if iterations < 4 * _BLOCK:
        raise describe.BadDescription(f"--iterations {iterations}: use at least {4 * _BLOCK}")
    half, ranks = half_of(iterations), len(topology.ranks)
    return Story(
        topology,
        target_of(options.target),
        iterations,
        # All ranks are restarted once, and all once more at half time: this is the third process of each.
        kill=_kill("--kill", options.kill, range(1, half), ranks, attempt=0),
        kill_in_place=_kill(
            "--kill-in-place", options.kill_in_place, range(half + 1, iterations), ranks, attempt=2
        ),
        out=options.out.resolve(),
    )


def _kill(option: str, text: str, iterations: range, ranks: int, attempt: int) -> Kill:
    rank, _, rest = text.partition(":")
    iteration, _, name = rest.partition(":")
    phase = next((phase for phase in PHASES if phase == name), None)
    is_rank_known = rank.isdecimal() and iteration.isdecimal() and int(rank) < ranks
    if not is_rank_known or phase is None or int(iteration) not in iterations:
        raise describe.BadDescription(
            f"{option} {text!r}: use RANK:ITERATION:PHASE, such as 2:{iterations.start}:all-gather; ranks "
            f"are 0 to {ranks - 1}, iterations {iterations.start} to {iterations[-1]}, "
            f"phases {', '.join(PHASES)}"
        )
    return Kill(int(rank), int(iteration), phase, attempt=attempt)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every promise was kept, 1 if not, 2 for an invalid command line."""
    use_plain_streams()
    options = _parser().parse_args(arguments)
    try:
        story = _story(options)
        for name in ("demo_uninterrupted", "demo_protected"):
            lab.down(name)  # left by a demo that was killed
        ending = perform(story, text_console(stderr=True))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(ending.data(), indent=2))
    else:
        report.show(ending.reference, ending.protected, ending.promises, ending.cost, text_console())
        print(f"\nloss curves: {os.path.relpath(ending.picture)}")
    return 0 if ending.good else 1


if __name__ == "__main__":
    sys.exit(main())
