"""`checkmate launch`: start this host's ranks, and each one that dies again, alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from checkmate.cli.common import AsLog, LogFormat, UsageFault, log_to_stderr, show_errors
from checkmate.cli.completing import job_paths
from checkmate.job.files import read_job
from checkmate.job.schema import JOB_VARIABLE
from checkmate.launch.launcher import HostRanks, Launcher
from checkmate.launch.restarts import Restarts


@show_errors
def launch(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT...",
            help="Behind `--`: the script and its arguments, or -m MODULE and its arguments.",
            show_default=False,
        ),
    ],
    job: Annotated[
        Path,
        typer.Option(
            "--job", envvar=JOB_VARIABLE, help="The job file.", show_default=False, autocompletion=job_paths
        ),
    ],
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="Number of hosts.")] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            min=0,
            help="This host's number.",
            show_default="$SLURM_NODEID, $JOB_COMPLETION_INDEX, or 0",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node", min=1, help="Ranks of each host.", show_default="the job's ranks, by hosts"
        ),
    ] = None,
    spare: Annotated[
        bool,
        typer.Option("--spare", help="Hold a process with the script's imports, in a dead rank's place."),
    ] = False,
    restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often each rank is started again.")
    ] = 100,
    patience: Annotated[
        float,
        typer.Option("--patience", min=2.0, help="Seconds after which a rank that does not run is killed."),
    ] = 60.0,
    log_format: AsLog = LogFormat.TEXT,
) -> None:
    """Start this host's ranks of a job, and start each one that dies again, alone.

    For scripts that call `checkmate.resilient`: the other ranks keep their processes. The ranks meet at the
    shadow nodes, so they need neither an address nor a port of one another. With --spare, a new rank needs no
    imports, for the memory of one more process on each host. Ctrl-C ends all ranks of this host.

    Exit status: 0 all ranks have ended well; 1 one can't go on, or was started too often; 2 bad input; 130
    Ctrl-C.

    Example: checkmate launch --job jobs/gpt.yaml --nnodes 16 --node-rank 3 --spare -- train.py --lr 1e-3
    """
    loaded = read_job(job)
    world = loaded.rank_count
    if nproc is None:
        if world % nnodes:
            raise UsageFault(
                f"{world} ranks of job {loaded.job} can't be shared out evenly to {nnodes} hosts: correct "
                "--nnodes, or give --nproc-per-node"
            )
        nproc = world // nnodes
    if nnodes * nproc != world:
        raise UsageFault(
            f"{nnodes} hosts with {nproc} ranks each are {nnodes * nproc} ranks, but job {loaded.job} has "
            f"{world}: correct --nnodes or --nproc-per-node"
        )
    node = _node_rank() if node_rank is None else node_rank
    if node >= nnodes:
        raise UsageFault(f"this host's number is {node} of {nnodes} (--nnodes): they begin with 0")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageFault(f"{script[0]}: no such script here")
    if script == ["-m"]:
        raise UsageFault("-m: which module?")
    log_to_stderr(log_format)
    os.environ[JOB_VARIABLE] = str(job)
    ranks = HostRanks(node * nproc, nproc, world, node)
    with Launcher(ranks, script, Restarts(restarts, patience), spare=spare) as launcher:
        status = launcher.run()
    raise typer.Exit(status)


def _node_rank() -> int:
    number = os.environ.get("SLURM_NODEID") or os.environ.get("JOB_COMPLETION_INDEX", "")
    return int(number) if number.isdecimal() else 0
