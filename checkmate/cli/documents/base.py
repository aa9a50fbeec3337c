"""What all documents have, and those of commands that only read files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from checkmate.base.wording import JSON_VERSION

Version = Annotated[int, Field(ge=JSON_VERSION, le=JSON_VERSION)]


class DocumentPart(BaseModel):
    """A part of a document. It has no other keys."""

    model_config = ConfigDict(extra="forbid")


class JsonDocument(DocumentPart):
    """A document."""

    version: Version


class FaultPart(DocumentPart):
    """A fault of a file; line 0 if it concerns the whole file."""

    file: str
    line: int
    path: str
    message: str


class ErrorDocument(BaseModel):
    """An error of any command; some add keys (docs/cli.md)."""

    version: Version
    error: str
    exit: int
    faults: list[FaultPart]


class ValidateDocument(JsonDocument):
    """`validate` of files without a fault."""

    valid: Literal[True]
    faults: list[FaultPart]
    notes: list[str]
    jobs: list[str]


class FindingPart(DocumentPart):
    """A check of a host, and what to do about it; `remedy` is empty unless there is something to do."""

    check: str
    outcome: Literal["ok", "warning", "failed", "not applicable"]
    detail: str
    remedy: str


class HostRolePart(DocumentPart):
    """A host in a role. `guessed`: how the role was guessed, if it was; `able`: whether nothing failed."""

    role: Literal["trainer", "shadow", "controller"]
    name: str
    guessed: str
    able: bool
    findings: list[FindingPart]


class DoctorDocument(JsonDocument):
    """`doctor`: each role that was looked at, and whether the host is able to have one of them."""

    job: str | None
    able: bool
    roles: list[HostRolePart]


class AuthorityPart(DocumentPart):
    """The authority of a job's keys."""

    folder: str
    made: list[str]
    kept: list[str]
    valid_until: str


class RolePart(AuthorityPart):
    """A role's folder of keys, and the hosts that need it."""

    role: Literal["controller", "trainer", "shadow", "reader"]
    hosts: list[str]


class JobKeysPart(DocumentPart):
    """The keys of a job."""

    job: str
    folder: str
    authority: AuthorityPart
    roles: list[RolePart]


class KeysDocument(JsonDocument):
    """`keys`."""

    keys: list[JobKeysPart]


class SettingPart(DocumentPart):
    """A setting of the kernel, as `sysctl` names it."""

    key: str
    value: str
    reason: str


class SysctlDocument(JsonDocument):
    """`sysctl`."""

    job: str
    role: Literal["trainer", "shadow"]
    settings: list[SettingPart]


class LabPart(DocumentPart):
    """A lab; `up` is null if only root can determine it."""

    name: str
    topology: str | None
    target: str | None
    up: bool | None
    job_file: str


class LabListDocument(JsonDocument):
    """`lab list`: titles of topologies by name, and labs."""

    topologies: dict[str, str]
    labs: list[LabPart]
