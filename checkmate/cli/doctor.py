"""`checkmate doctor`: check a host for its role."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer
from rich.text import Text

from checkmate.base.wording import counted, did_you_mean
from checkmate.cli.common import (
    AsJson,
    Insecure,
    OptionalJobArgument,
    UsageFault,
    err,
    out,
    print_json,
    show_errors,
)
from checkmate.doctor import subjects
from checkmate.doctor.diagnosis import Diagnosis, diagnose
from checkmate.doctor.findings import Finding, Outcome
from checkmate.doctor.reading import is_here
from checkmate.doctor.subjects import ROLES, Subject
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from checkmate.keys.roles import Role, role_folder
from checkmate.output.consoles import spinner
from checkmate.output.tables import FittedTable

UNABLE: Final = 9
"""Exit status if something keeps the host from its role."""
_COLOURS: Final = {Outcome.OK: "green", Outcome.WARNING: "yellow", Outcome.FAILED: "red"}


@show_errors
def doctor(
    job: OptionalJobArgument = None,
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            help="trainer, shadow or controller.",
            show_default="guessed by addresses",
            autocompletion=lambda: [str(role) for role in ROLES],
        ),
    ] = None,
    number: Annotated[
        int | None, typer.Option("--id", help="Which shadow node, or with --role trainer which rank.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Which host, by its name or an address.")] = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check this host: what would keep it from its role in a job, or slow it down, with remedies.

    Without a job file, each role is looked at. With one, also interfaces, ports, keys, and the hosts that
    this one calls; the role is guessed by the job's addresses. Only reads: it claims no port, and becomes no
    switch's primary. Run it as the user, and with the capabilities, that the role's process will have.

    Exit status 9 if something keeps the host from its role; without a job file, from all that were looked at.

    Example: checkmate doctor jobs/gpt.yaml
    """
    role_to_check = _role(role)
    loaded = None if job is None else read_job(job)
    if loaded is None and (number is not None or host is not None):
        raise UsageFault("--id and --host are of a job: give its file too")
    roles_of_host = _subjects(loaded, role_to_check, number, host)
    with spinner(err, "checking this host"):
        diagnoses = [diagnose(subject, job, insecure=insecure) for subject in roles_of_host]
    able = any(diagnosis.is_able for diagnosis in diagnoses)
    if as_json:
        print_json(_document(loaded, diagnoses, able))
    else:
        for diagnosis in diagnoses:
            _show(diagnosis)
        _conclude(diagnoses)
    if not able:
        raise typer.Exit(UNABLE)


def _role(text: str | None) -> Role | None:
    names = [str(role) for role in ROLES]
    if text is None or text in names:
        return None if text is None else Role(text)
    raise UsageFault(f"no role {text!r}{did_you_mean(text, names)}; there are {', '.join(names)}")


def _subjects(job: Job | None, role: Role | None, number: int | None, host: str | None) -> list[Subject]:
    """Return the subjects for which this host is checked."""
    if job is None:
        return [subjects.any_host(host_role) for host_role in ROLES if role in (None, host_role)]
    if number is not None or host is not None or role is Role.CONTROLLER:
        return [subjects.choose(job, role, number, host)]
    keys = None if job.keys is None else role_folder(job.keys, job.job, Role.CONTROLLER)
    controls = keys is not None and os.path.isdir(keys)
    return [subjects.guess(job, is_here, role=role, controls=controls)]


def _document(job: Job | None, diagnoses: list[Diagnosis], able: bool) -> dict[str, object]:
    return {
        "job": None if job is None else job.job,
        "able": able,
        "roles": [
            {
                "role": str(diagnosis.subject.role),
                "name": diagnosis.subject.name,
                "guessed": diagnosis.subject.guessed,
                "able": diagnosis.is_able,
                "findings": [
                    {
                        "check": finding.check,
                        "outcome": str(finding.outcome),
                        "detail": finding.detail,
                        "remedy": finding.remedy,
                    }
                    for finding in diagnosis.findings
                ],
            }
            for diagnosis in diagnoses
        ],
    }


def _show(diagnosis: Diagnosis) -> None:
    subject = diagnosis.subject
    why = f", because {subject.guessed}" if subject.guessed else ""
    table = FittedTable(
        f"as {subject.name}{why}", "check", "result", "found", "remedy", folds=("found", "remedy")
    )
    for finding in diagnosis.findings:
        table.add_row(
            finding.check,
            Text(finding.outcome, _COLOURS.get(finding.outcome, "")),
            finding.detail,
            finding.remedy,
        )
    out.print(table)


def _conclude(diagnoses: list[Diagnosis]) -> None:
    """Print what this host can be, and how much there is to do."""
    for diagnosis in diagnoses:
        can = "can be" if diagnosis.is_able else "cannot be"
        failures, warnings = (
            _count(diagnosis.findings, Outcome.FAILED),
            _count(diagnosis.findings, Outcome.WARNING),
        )
        counts = f"{counted(failures, 'check')} failed, {counted(warnings, 'warning')}"
        out.print(f"this host {can} {diagnosis.subject.name}: {counts}", soft_wrap=True, markup=False)


def _count(findings: tuple[Finding, ...], outcome: Outcome) -> int:
    return sum(finding.outcome is outcome for finding in findings)
