"""`checkmate consolidate`: write a checkpoint from the shadow nodes to disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import DownloadColumn, TimeElapsedColumn
from rich.text import Text

from checkmate.base.privileges import Capability, become, keep_only, owner_of, to_listen, to_read
from checkmate.base.wording import counted
from checkmate.cli.common import (
    AsJson,
    Insecure,
    JobArgument,
    Metrics,
    UsageFault,
    err,
    metrics_ports,
    out,
    print_json,
    show_errors,
)
from checkmate.cli.shadow import stopping
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.keys.access import Access, access
from checkmate.keys.roles import Role, role_folder
from checkmate.output.consoles import progress, spinner, spinner_or_line
from topologies.signals import unwinding

if TYPE_CHECKING:
    from checkmate.consolidate.follow import FollowListener, SavedCheckpoint
    from checkmate.consolidate.snapshot import SnapshotReader


class FormatChoice(StrEnum):
    """The format of a checkpoint."""

    dcp = "dcp"
    torch = "torch"
    torchtitan = "torchtitan"


@show_errors
def consolidate(
    job: JobArgument,
    to: Annotated[
        Path,
        typer.Option("--out", help="Checkpoint to write; with --every, folder of checkpoints."),
    ],
    kind: Annotated[
        FormatChoice,
        typer.Option(
            "--format",
            help="dcp: PyTorch Distributed Checkpoint, a folder; torch: one file; torchtitan: its keys.",
        ),
    ] = FormatChoice.dcp,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for all shards.")
    ] = 60.0,
    every: Annotated[
        int | None,
        typer.Option("--every", min=1, help="Continue, and write a checkpoint every N iterations."),
    ] = None,
    keep: Annotated[
        int,
        typer.Option("--keep", min=1, help="With --every: checkpoints to keep, beside each run's last."),
    ] = 3,
    metrics: Metrics = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Write the newest iteration that the shadow nodes hold, in a format that plain PyTorch loads.

    Only reads from the nodes, during training or after it, and never stops training. Needs the folder of
    keys of role reader. A checkpoint is written
    completely or not at all. With --every it continues until Ctrl-C and retries after every failure; it
    reports when no checkpoint is available, when one is available again, and each one that cannot be written.
    Exit status 8 if no iteration is complete within --timeout; the message lists the missing parts. Exit
    status 3 if no node can be reached.

    Example: checkmate consolidate jobs/gpt.yaml --out checkpoint/
    """
    loaded = read_job(job)
    if every is None:
        if metrics is not None:
            raise UsageFault("--metrics needs --every: one checkpoint ends before anybody could read them")
        _check_free(to, kind)
    elif kind is FormatChoice.torchtitan:
        raise UsageFault("--every keeps checkpoints for checkmate.restore, which needs --format dcp or torch")
    keys = [] if loaded.keys is None else [role_folder(loaded.keys, loaded.job, Role.READER)]
    owner = owner_of(to) if os.geteuid() == 0 else None
    to_leave = () if owner is None else (Capability.SETUID, Capability.SETGID)
    keep_only(*to_read(keys), *to_listen(metrics_ports(metrics)), *to_leave)
    with spinner(err, "starting"):  # torch takes a second
        from checkmate.consolidate import dcp_folder, follow  # noqa: F401, PLC0415 - all, before another user may not
        from checkmate.consolidate.snapshot import SnapshotReader  # noqa: PLC0415

    reader = access(loaded, Role.READER, insecure=insecure)
    if owner is not None:
        become(owner)
    with unwinding():
        if every is None:
            words = f"reading the shadow nodes; all shards have to be there within {timeout:g} s"
            with _nodes(loaded, reader) as nodes, spinner_or_line(err, words):
                checkpoint = follow.take(nodes, to, kind.value, timeout, _warning)
            print_json(_data(checkpoint)) if as_json else _print_saved(checkpoint)
            return
        listener = follow.FollowListener(
            (lambda checkpoint: print_json(_data(checkpoint), line=True)) if as_json else _print_saved,
            _waiting,
            _warning,
            lambda: err.print("[green]available:[/green] the checkpoint can be read again"),
        )
        with (
            stopping() as stopped,
            SnapshotReader(loaded, stopped=stopped, reader=reader) as nodes,
            nullcontext(listener)
            if metrics is None
            else _with_metrics(metrics, loaded.job, every, listener) as listener_with_metrics,
        ):
            follow.follow(nodes, to, kind.value, timeout, every, keep, stopped, listener_with_metrics)


def _check_free(to: Path, kind: FormatChoice) -> None:
    """Raise `UsageFault`, before anything is read, if the checkpoint's place is taken."""
    try:
        is_taken = to.is_dir() and (kind is FormatChoice.torch or any(to.iterdir()))
    except OSError as error:
        raise UsageFault(f"{to} can't be written: {error.strerror}") from None
    if is_taken:
        raise UsageFault(f"{to} is an existing folder; choose another, or add --every")


@contextmanager
def _with_metrics(address: str, job: str, every: int, listener: FollowListener) -> Iterator[FollowListener]:
    """Serve metrics of the calls to a listener, and pass them on."""
    from checkmate.base.metrics import MetricsServer  # noqa: PLC0415 - an extra
    from checkmate.consolidate.follow import FollowListener  # noqa: PLC0415
    from checkmate.consolidate.metrics import KeeperTally, families  # noqa: PLC0415 - an extra

    tally = KeeperTally(job, every)

    def on_saved(checkpoint: SavedCheckpoint) -> None:
        tally.note_saved(checkpoint, time.time())
        listener.on_saved(checkpoint)

    def on_trouble(why: str) -> None:
        tally.note_failure(why)
        listener.on_trouble(why)

    def on_recovery() -> None:
        tally.note_recovery()
        listener.on_recovery()

    with MetricsServer(address, lambda: families(tally), tally.not_ready):
        yield FollowListener(on_saved, on_trouble, listener.on_leftover, on_recovery, tally.note_progress)


@contextmanager
def _nodes(job: Job, reader: Access) -> Iterator[SnapshotReader]:
    """Open a reader of the job's nodes that shows progress on a terminal."""
    from checkmate.consolidate.snapshot import SnapshotReader  # noqa: PLC0415

    with progress(err, DownloadColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(f"reading job {job.job}", total=None)
        advance = partial(bar.advance, task)
        with SnapshotReader(job, advance, reader=reader) as nodes:
            yield nodes


def _data(checkpoint: SavedCheckpoint) -> dict[str, object]:
    return {**asdict(checkpoint), "path": str(checkpoint.path), "seconds": round(checkpoint.seconds, 3)}


def _warning(text: str) -> None:
    err.print(Text.assemble(("warning:", "yellow"), f" {text}"), soft_wrap=True)


def _waiting(text: str) -> None:
    err.print(Text.assemble(("waiting:", "yellow"), f" {text}"), soft_wrap=True)


def _print_saved(checkpoint: SavedCheckpoint) -> None:
    out.print(
        f"{checkpoint.path}: iteration {checkpoint.iteration} of job {checkpoint.job}, "
        f"{counted(checkpoint.shards, 'shard')}, "
        f"{checkpoint.nbytes / 1e6:.1f} MB in {checkpoint.seconds:.1f} s",
        soft_wrap=True,
        markup=False,
    )
