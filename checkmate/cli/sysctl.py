"""`checkmate sysctl`: print the kernel settings that a job's hosts need."""

from __future__ import annotations

from typing import Annotated

import typer

from checkmate.cli.common import AsJson, JobArgument, UsageFault, out, print_json, show_errors
from checkmate.job.files import read_job
from checkmate.keys.roles import Role
from checkmate.planner import kernel_settings
from checkmate.shadow.receive.connect import RECEIVE_BUFFER


@show_errors
def sysctl(
    job: JobArgument,
    role: Annotated[
        str,
        typer.Option(
            "--role",
            help="The hosts that need them: trainer or shadow.",
            autocompletion=lambda: [Role.TRAINER, Role.SHADOW],
        ),
    ],
    receive_buffer: Annotated[
        int | None,
        typer.Option(
            "--receive-buffer",
            min=1,
            max=1023,
            help="That of `checkmate shadow`, in MB.",
            show_default=str(RECEIVE_BUFFER >> 20),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the kernel settings of a job's hosts as a file for sysctl, each with its reason.

    Run it on the host itself: no value is below the host's present one. All hosts of a role can have the same
    file; it fits the one with most streams. Controllers and readers need no settings.

    Example: checkmate sysctl job.yaml --role shadow > /etc/sysctl.d/60-checkmate.conf
    """
    loaded = read_job(job)
    if role == Role.TRAINER:
        if receive_buffer is not None:
            raise UsageFault("--receive-buffer is of shadow nodes; use it with --role shadow")
        settings = kernel_settings.trainer_settings(loaded)
    elif role == Role.SHADOW:
        if receive_buffer is not None and loaded.copies == "host":
            raise UsageFault("--receive-buffer is for copies by switch; with copies by hosts, leave it out")
        buffer = RECEIVE_BUFFER if receive_buffer is None else receive_buffer << 20
        settings = kernel_settings.shadow_node_settings(loaded, buffer)
    else:
        fault = f"hosts of role {role} need no kernel settings" if role in {*Role} else f"no role {role}"
        raise UsageFault(f"{fault}; --role is trainer or shadow")
    if as_json:
        print_json({"job": loaded.job, "role": role, "settings": [setting._asdict() for setting in settings]})
        return
    lines = [f"# Hosts of role {role} of job {loaded.job}. `sysctl --system` applies it."]
    if not settings:
        lines = [f"# Hosts of role {role} of job {loaded.job} need no other settings than this host has."]
    reason = ""
    for setting in settings:
        if setting.reason != reason:
            lines += ["", f"# {setting.reason}"]
            reason = setting.reason
        lines.append(f"{setting.key} = {setting.value}")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
