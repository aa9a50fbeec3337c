"""`checkmate reset`: discard what shadow nodes hold, so that the next start begins with iteration 0."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from checkmate.base.privileges import keep_only, to_read
from checkmate.cli.common import (
    AsJson,
    Insecure,
    JobArgument,
    UsageFault,
    confirm,
    err,
    out,
    print_json,
    show_errors,
)
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.keys.access import access
from checkmate.keys.roles import Role, role_folder
from checkmate.nodes import reset as resetting
from checkmate.nodes.reset import Discard
from checkmate.nodes.standing import node_name
from checkmate.nodes.stubs import Stubs


@show_errors
def reset(
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Discard what a job's shadow nodes hold: the next start of training begins with iteration 0.

    Once, from any host that reaches the shadow nodes and has the folder of keys of role trainer. Refused
    while training runs. A node that does not answer does not bring its old state back later. Checkpoints on
    disk stay, but the next starts do not resume from them.

    Exit status: 1 if training runs, a node has refused or the answer is no; 2 bad input; 3 if no node
    answers.

    Example: checkmate reset jobs/gpt.yaml
    """
    loaded = read_job(job)
    keep_only(*to_read([] if loaded.keys is None else [role_folder(loaded.keys, loaded.job, Role.TRAINER)]))
    with Stubs(loaded, access(loaded, Role.TRAINER, insecure=insecure).keys) as stubs:
        discard = resetting.ask(loaded, stubs)
        if not yes:
            _confirm(loaded, discard)
            discard = resetting.ask_again(loaded, stubs, discard)
        resetting.discard(loaded, stubs, discard)
    for node, why in discard.silent.items():
        warning = f"{node_name(loaded, node)} does not answer ({why}). What it holds does not count any more"
        err.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)
    if as_json:
        silent = {str(node): why for node, why in discard.silent.items()}
        nodes = list(discard.answering)
        print_json({"job": loaded.job, "iteration": discard.iteration, "nodes": nodes, "silent": silent})
        return
    out.print(
        f"{_discarded_words(loaded, discard)} discarded. The next start of training begins with iteration 0. "
        "Checkpoints on disk stay, and it does not use them.",
        soft_wrap=True,
        markup=False,
    )


def _confirm(job: Job, discard: Discard) -> None:
    """Ask, on a terminal. Raise `UsageFault` without one, and `Declined` if the answer is no."""
    if not sys.stdin.isatty():
        raise UsageFault(
            f"{_discarded_words(job, discard)} about to be discarded: add --yes, because nobody can be asked"
        )
    confirm(f"{_discarded_words(job, discard)} about to be discarded. Continue?", "nothing was discarded")


def _discarded_words(job: Job, discard: Discard) -> str:
    if discard.iteration is None:
        return f"Job {job.job}: all earlier runs are"
    if discard.iteration < 0:
        return f"Job {job.job}: the state from before its first iteration is"
    return f"Job {job.job}: iteration {discard.iteration} and all before it are"
