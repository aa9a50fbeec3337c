"""Messages about job files: in our words whatever is wrong, with what was probably meant."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.job import checks
from checkmate.job.files import JobError, read_job
from checkmate.job.following import JobFiles, job_files
from testbed.jobs import job_data

WHOLE: dict[str, Any] = {**job_data(nodes=2), "tag": {"dscp_bit": 32, "priority": 3}, "keys": "keys"}
WHOLE["fabric"]["switches"][0] |= {
    "tls": {"ca": "a", "cert": "b", "key": "c"},
    "pfc": {"watchdog": 200},
    "ports": {"1/0": {"device_port": 1, "cable": 2.0}},
    "mtu": 9000,
}
WRONG: list[Any] = [None, -1, 0, 10**30, 1.5, float("nan"), "", "x", "d\xe9mo", [], {}, ["x"], {"x": 1}, True]
FOREIGN = re.compile(r"[Ii]nput|should|valid (?!Y)|type=|pydantic|[Uu]nable|greater|None|True|\bdict|\btuple")


def places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a file."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def changed_job(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    data: Any = copy.deepcopy(WHOLE)
    at = data
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return dict(data)


def test_no_message_is_a_librarys() -> None:
    """Every value of a file is replaced by every wrong one."""
    assert checks.structure(WHOLE)[1] == []
    messages = {
        fault.message
        for path in places(WHOLE)
        for value in WRONG
        for fault in checks.structure(changed_job(path, value))[1]
    }
    assert len(messages) > 100
    assert [message for message in sorted(messages) if FOREIGN.search(message)] == []


def fault(file: Path) -> str:
    with pytest.raises(JobError) as excinfo:
        read_job(file)
    return str(excinfo.value).replace(f"{file.parent}/", "")


@pytest.mark.parametrize(
    ("path", "key", "words"),
    [
        ((), "chanels", "unknown key; did you mean channels?"),
        (
            (),
            "colour",
            "unknown key; the keys here are job, copies, fabric, tag, collective, tree_bytes, channels, ",
        ),
        (("dp_groups", 0, "ranks", 0), "adresses", "unknown key; did you mean addresses?"),
        (("fabric", "switches", 0), "adress", "unknown key; did you mean address?"),
        (("shadow_nodes", 0, "nics", 0), "mack", "unknown key; did you mean mac?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(
    path: tuple[str | int, ...], key: str, words: str
) -> None:
    (fault_found,) = checks.structure(changed_job((*path, key), 1))[1]
    assert (fault_found.path, fault_found.message.startswith(words)) == ((*path, key), True), fault_found


def test_a_name_that_is_almost_a_files_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "\xfcbung 1.yaml").touch()
    assert fault(tmp_path / "ubung 1.yaml") == (
        "ubung 1.yaml: (file): cannot be read: No such file or directory; did you mean \xfcbung 1.yaml?"
    )
    assert fault(tmp_path / "no" / "gpt.yaml").endswith("cannot be read: No such file or directory")


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    folder = tmp_path / "my jobs"
    folder.mkdir()
    assert fault(folder) == "my jobs: (file): is a folder; give the path of a file in it"


def test_what_is_not_a_file_in_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_data()))
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "fifo.yaml")  # reading it would block
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    assert job_files([tmp_path]) == [tmp_path / "gone.yaml", tmp_path / "job.yaml"]
    (located,) = JobFiles([tmp_path]).read().faults
    assert located.message.startswith("cannot be read: No such file")


def test_a_name_that_is_too_long_is_a_fault(tmp_path: Path) -> None:
    (located,) = JobFiles([tmp_path / f"{'x' * 300}.yaml"]).read().faults
    assert located.message == "cannot be read: File name too long"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_what_may_not_be_read_is_a_fault() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        (folder := Path(temporary) / "jobs").mkdir()
        (folder / "job.yaml").write_text("job: a")
        (Path(temporary) / "job.yaml").write_text("job: a")
        for path, mode in ((Path(temporary), 0o755), (folder, 0o700), (Path(temporary) / "job.yaml", 0o600)):
            path.chmod(mode)
        os.seteuid(65534)
        try:
            located = JobFiles([folder, folder / "job.yaml", Path(temporary) / "job.yaml"]).read().faults
        finally:
            os.seteuid(0)
    assert [fault.message for fault in located] == ["cannot be read: Permission denied"] * 3


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("latin-1", "job.yaml:2: (file): is not UTF-8: byte 0xE9; save the file as UTF-8"),
        ("utf-16", "job.yaml:1: (file): is UTF-16; save it as UTF-8"),
    ],
)
def test_another_encoding_is_named(tmp_path: Path, encoding: str, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes("# \njob: d\xe9mo\n".encode(encoding))
    assert fault(file) == words


@pytest.mark.parametrize("change", ["utf-8-sig", "\r\n", "\r"])
def test_editors_of_other_systems_write_job_files(tmp_path: Path, change: str) -> None:
    text = yaml.safe_dump(job_data())
    content = text.encode(change) if change == "utf-8-sig" else text.replace("\n", change).encode()
    file = tmp_path / "d\xe9mo 1.yaml"
    file.write_bytes(content)
    assert read_job(file).job == "demo"
