"""`checkmate reset`: discards what the shadow nodes hold, so that the next start begins with iteration 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkmate.base.wording import counted
from checkmate.job.schema import Job
from checkmate.nodes.standing import Answers, counted_holds, greatest_generation, node_name
from checkmate.nodes.stubs import Stubs
from checkmate.nodes.target import LAB_HINT
from checkmate.rpc import shadow_pb2 as pb


class NotReset(RuntimeError):
    """Nothing was discarded, or not everywhere. The message names the nodes."""

    exit_code = 1


class NoNode(NotReset):
    """No shadow node answers that knows what to discard."""

    exit_code = 3


@dataclass(frozen=True)
class Discard:
    """What is to be discarded: all runs up to `generation`, on the nodes `answering` and on all others."""

    generation: int
    iteration: int | None
    """The newest iteration that is held; `None` if no node holds anything."""
    answering: tuple[int, ...]
    silent: Mapping[int, str] = field(default_factory=dict)
    """Why the other nodes do not answer. What they hold does not count any more either."""


def ask(job: Job, stubs: Stubs) -> Discard:
    """Return what there is to discard, from the nodes' statuses. Changes nothing.

    Raises:
        NotReset: Training runs.
        NoNode: No node answers, or those that do know of no run, and others may hold one.
    """
    return decide(job, stubs.statuses([node.id for node in job.shadow_nodes]))


def ask_again(job: Job, stubs: Stubs, plan: Discard) -> Discard:
    """Return what there is to discard some time after `plan`. Raise `NotReset` also if it is more."""
    now = ask(job, stubs)
    if (now.generation, now.iteration) != (plan.generation, plan.iteration):
        raise NotReset(
            f"job {job.job} was trained in the meantime, so nothing was discarded; repeat the command"
        )
    return now


def decide(job: Job, answers: Answers) -> Discard:
    """Return what there is to discard. Raises like `ask`."""
    silent = {node: statuses for node, statuses in answers.items() if isinstance(statuses, str)}
    statuses = {node: answer for node, answer in answers.items() if isinstance(answer, pb.NodeStatus)}
    away = "; ".join(f"{node_name(job, node)}: {why}" for node, why in silent.items())
    if not statuses:
        raise NoNode(f"no shadow node of job {job.job} answers ({away}); {LAB_HINT}")
    if running := {node: answer.trainers for node, answer in statuses.items() if answer.trainers}:
        node, ranks = next(iter(running.items()))
        raise NotReset(
            f"training of job {job.job} runs: {counted(ranks, 'rank is', 'ranks are')} connected to "
            f"{node_name(job, node)}. Stop it first; a rank whose host has vanished counts for 15 s more"
        )
    generation = greatest_generation(answers)
    if silent and not generation:
        raise NoNode(
            f"the shadow nodes of job {job.job} that answer hold nothing, and others may hold a run: {away}; "
            "repeat the command once they answer"
        )
    iterations = [hold.stepped for _, hold in counted_holds(answers) if hold.seeded]
    return Discard(max(generation, 1), max(iterations, default=None), tuple(statuses), silent)


def discard(job: Job, stubs: Stubs, plan: Discard) -> None:
    """Discard it. May be repeated, also after it has failed half way.

    Raises:
        NotReset: Some of the nodes have not done it. The message names them.
    """
    answers = stubs.reset(plan.answering, plan.generation)
    failed = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    if failed:
        lines = "; ".join(f"{node_name(job, node)}: {why}" for node, why in failed.items())
        raise NotReset(f"not discarded on all shadow nodes ({lines}); repeat the command")
