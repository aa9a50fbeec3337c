"""Checkpoints that someone has prepared: nothing in them runs, and no memory is spent on claims."""

from __future__ import annotations

import io
import os
import pickle
import stat
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as meta

from checkmate import state
from checkmate.consolidate import archives, dcp_folder, disk
from checkmate.consolidate.assemble import checkpoint
from checkmate.rpc.protocol import PROTOCOL
from tests.support.checkpoints import DiskRun
from tests.support.fuzz import damaged, fuzz


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def dcp_checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "generation-0001-iteration-00000002"
    disk.save(checkpoint(DiskRun().snapshot(), by_name=True), path, "dcp")
    return path


def check_refused(path: Path, words: str) -> None:
    with pytest.raises(disk.DiskError, match=words) as excinfo:
        disk.load(path)
    assert "\n" not in str(excinfo.value)
    assert disk.read_run(path) is None


def test_an_index_runs_nothing(dcp_checkpoint: Path) -> None:
    mark = dcp_checkpoint.parent / "ran"
    (dcp_checkpoint / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    check_refused(dcp_checkpoint, "its index refers to posix.mkdir, which no checkpoint needs")
    assert not mark.exists()


class AsOldPython(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, meta._MEM_FORMAT_ENCODING):
            return getattr, (meta._MEM_FORMAT_ENCODING, value.name)
        return NotImplemented


def test_an_index_of_another_python_is_read(dcp_checkpoint: Path) -> None:
    index = dcp_folder.read_index(dcp_checkpoint)
    data = io.BytesIO()
    AsOldPython(data).dump(index)
    assert b"getattr" in data.getvalue()
    (dcp_checkpoint / ".metadata").write_bytes(data.getvalue())
    assert dcp_folder.read_index(dcp_checkpoint).state_dict_metadata == index.state_dict_metadata


def test_an_index_reaches_no_attribute(dcp_checkpoint: Path) -> None:
    data = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nTensorProperties\nV__init__\ntR."
    (dcp_checkpoint / ".metadata").write_bytes(data)
    check_refused(dcp_checkpoint, "its index refers to builtins.getattr, which no checkpoint needs")


KINDS = [name for name, class_ in dcp_folder._CLASSES.items() if not isinstance(class_, torch.dtype)]


@pytest.mark.parametrize("kind", KINDS, ids=".".join)
def test_an_index_changes_nothing_outside_of_itself(dcp_checkpoint: Path, kind: tuple[str, str]) -> None:
    module, name = (word.encode() for word in kind)
    there = dcp_folder._CLASSES[kind]
    payload = b"\x80\x02c%b\n%b\nN}X\x08\x00\x00\x00__init__ctorch\nfloat32\ns\x86b0" % (module, name)
    whole = (dcp_checkpoint / ".metadata").read_bytes()
    (dcp_checkpoint / ".metadata").write_bytes(payload + whole[2:])
    check_refused(dcp_checkpoint, "can't read")
    assert getattr(there, "__init__") is not torch.float32  # noqa: B009
    (dcp_checkpoint / ".metadata").write_bytes(whole)
    assert disk.load(dcp_checkpoint)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn])
def test_tensors_of_any_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """As buffers may be: rotary embeddings often are complex."""
    document = checkpoint(DiskRun().snapshot(), by_name=True)
    document["buffers"]["other"] = torch.ones(4).to(dtype)
    disk.save(document, tmp_path / "one", "dcp")
    assert disk.load(tmp_path / "one")["buffers"]["other"].dtype == dtype


def test_a_pipe_is_not_waited_for(dcp_checkpoint: Path) -> None:
    index = dcp_folder.read_index(dcp_checkpoint)
    os.mkfifo(dcp_checkpoint / "pipe")
    index.storage_data = {
        key: replace(at, relative_path="pipe", offset=0, length=0) for key, at in index.storage_data.items()
    }
    (dcp_checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    check_refused(dcp_checkpoint, "of pipe, which the folder does not have")
    (dcp_checkpoint / ".metadata").unlink()
    os.mkfifo(dcp_checkpoint / ".metadata")
    check_refused(dcp_checkpoint, "its index can't be opened: it is not a file")


def replaced_by_a_pipe(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, path: Path) -> None:
    """Have somebody put a pipe in a file's place after a function has looked at it."""
    looks = getattr(module, name)

    def look(*arguments: Any, **keywords: Any) -> Any:
        result = looks(*arguments, **keywords)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        monkeypatch.setattr(module, name, looks)
        return result

    monkeypatch.setattr(module, name, look)


def test_a_pipe_that_comes_after_the_index_was_checked_is_not_waited_for(
    dcp_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data,) = dcp_checkpoint.glob("*.distcp")
    replaced_by_a_pipe(monkeypatch, dcp_folder, "_check", data)
    check_refused(dcp_checkpoint, "it is not a file")


def test_a_pipe_in_the_place_of_a_torch_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.pt"
    disk.save(checkpoint(DiskRun().snapshot(), by_name=True), path, "torch")
    assert disk.is_checkpoint(path)
    path.unlink()
    os.mkfifo(path)
    check_refused(path, "it is not a file")


def test_bytes_count_once(dcp_checkpoint: Path) -> None:
    """Otherwise a thousand names of the same bytes would take a thousand times their memory."""
    index = dcp_folder.read_index(dcp_checkpoint)
    place = max(index.storage_data.values(), key=lambda storage_place: storage_place.length)
    for number in range(1000):
        index.storage_data[meta.MetadataIndex(f"extra.{number}")] = place
    (dcp_checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    check_refused(dcp_checkpoint, "its index refers to .* bytes, its files have")


def test_a_value_runs_nothing(dcp_checkpoint: Path) -> None:
    mark = dcp_checkpoint.parent / "ran"
    index = dcp_folder.read_index(dcp_checkpoint)
    name, place = next(
        (index_key.fqn, at) for index_key, at in index.storage_data.items() if index_key.fqn == "run"
    )
    blob = io.BytesIO()
    torch.save(Runs(mark), blob)
    (dcp_checkpoint / "evil.distcp").write_bytes(blob.getvalue())
    (key,) = [index_key for index_key in index.storage_data if index_key.fqn == name]
    index.storage_data[key] = replace(
        place, relative_path="evil.distcp", offset=0, length=len(blob.getvalue())
    )
    (dcp_checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    check_refused(dcp_checkpoint, "not an archive of tensors and plain values: .*mkdir")
    assert not mark.exists()


def test_an_index_that_claims_more_than_the_files_have_is_refused(dcp_checkpoint: Path) -> None:
    index = dcp_folder.read_index(dcp_checkpoint)
    tensor = next(
        metadata
        for metadata in index.state_dict_metadata.values()
        if isinstance(metadata, meta.TensorStorageMetadata)
    )
    tensor.size = torch.Size([1 << 45])
    (dcp_checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    check_refused(dcp_checkpoint, "its index has 140737.* bytes of tensors, its files have")


@pytest.mark.parametrize("foreign_path", ["../secret", "/etc/passwd"])
def test_an_index_reaches_no_other_file(dcp_checkpoint: Path, foreign_path: str) -> None:
    (dcp_checkpoint.parent / "secret").write_bytes(bytes(1 << 20))
    index = dcp_folder.read_index(dcp_checkpoint)
    index.storage_data = {
        key: replace(at, relative_path=foreign_path) for key, at in index.storage_data.items()
    }
    (dcp_checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    check_refused(dcp_checkpoint, f"of {foreign_path}, which the folder does not have")


def test_a_checkpoint_of_a_newer_version_says_so(tmp_path: Path) -> None:
    for kind in ("dcp", "torch"):
        document = {**checkpoint(DiskRun().snapshot(), by_name=kind == "dcp"), "protocol": 99}
        disk.save(document, tmp_path / kind, kind)
        with pytest.raises(
            disk.DiskError, match=f"it has format 99, .* reads up to {PROTOCOL}: this version is older"
        ):
            disk.load(tmp_path / kind)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_only_the_owner_can_read_a_checkpoint(tmp_path: Path, kind: disk.Format) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "new" / "one.pt"
        disk.save(checkpoint(DiskRun().snapshot(), by_name=kind == "dcp"), path, kind)
    finally:
        os.umask(before)
    for entry in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(entry.stat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


def compressed(blob: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file, zipfile.ZipFile(io.BytesIO(blob)) as old:
        for member in old.infolist():
            file.writestr(member.filename, old.read(member))
    return buffer.getvalue()


def torch_bytes(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def nested(tuples: int) -> bytes:
    """Return the pickle of a dictionary whose key is a tuple that deep, which overflows the stack."""
    return b"\x80\x02}K\x01" + b"\x85" * tuples + b"K\x02s."


NESTED_BY_NAMES = (
    b"\x80\x02}K\x01" + b"".join(b"\x85q%ch%c" % (n % 250, n % 250) for n in range(70)) + b"K\x02s."
)


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (compressed(torch_bytes(torch.zeros(1 << 20))), "it is compressed"),
        (archive(b"\x80\x02cnumpy\ndtype\nX\x03\x00\x00\x00V,,\x85R."), "numpy.dtype"),
        (archive(nested(400_000)), "tuples are nested more than 64 deep"),
        (archive(NESTED_BY_NAMES), "tuples are nested more than 64 deep"),
        (b"PK\x03\x04", "not a zip file"),
    ],
    ids=["compressed", "numpy", "nested", "memo", "cut"],  # archives have the time
)
@pytest.mark.parametrize("mapped", [False, True])
def test_an_archive_is_of_plain_values_or_refused(
    blob: bytes, words: str, mapped: bool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(blob)
    with pytest.raises(state.StateError, match=f"not an archive of tensors and plain values: .*{words}"):
        archives.load(tmp_path / "file", mapped=mapped)
    with pytest.raises(state.StateError, match="not an archive"):
        archives.load(blob)


def test_an_index_that_nests_is_refused(dcp_checkpoint: Path) -> None:
    (dcp_checkpoint / ".metadata").write_bytes(nested(400_000))
    check_refused(dcp_checkpoint, "tuples are nested more than 64 deep")


def test_an_index_changes_no_enumeration(dcp_checkpoint: Path) -> None:
    """Members are the same objects in the whole process."""
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    payload = b"\x80\x02" + kind + b"K\x00\x85R}X\x06\x00\x00\x00_value_K\x07sb."
    (dcp_checkpoint / ".metadata").write_bytes(payload)
    check_refused(dcp_checkpoint, "can't read")
    assert meta._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


def test_a_checkpoint_of_protocol_6_is_read(tmp_path: Path) -> None:
    document = checkpoint(DiskRun().snapshot(), by_name=True)
    exact = state.loads(document["exact"])
    disk.save({**document, "protocol": 6, "exact": torch_bytes(exact)}, tmp_path / "old", "dcp")
    assert disk.load(tmp_path / "old")["extra"] == exact["extra"]


@fuzz(60, data=st.data())
def test_a_damaged_folder_is_read_or_refused(dcp_checkpoint: Path, data: st.DataObject) -> None:
    path = dcp_checkpoint / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    whole = path.read_bytes()
    path.write_bytes(damaged(data, whole))
    try:
        disk.load(dcp_checkpoint)
    except disk.DiskError as error:
        assert "\n" not in str(error)
    finally:
        path.write_bytes(whole)


@fuzz(60, data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "generation-0001-iteration-00000002.pt"
    if not path.exists():
        disk.save(checkpoint(DiskRun().snapshot(), by_name=False), path, "torch")
    whole = path.read_bytes()
    path.write_bytes(damaged(data, whole))
    try:
        disk.load(path)
    except disk.DiskError as error:
        assert "\n" not in str(error)
    finally:
        path.write_bytes(whole)


@fuzz(200, blob=st.binary(max_size=200), data=st.data())
def test_plain_state_is_read_or_refused(blob: bytes, data: st.DataObject) -> None:
    good = state.dumps({"a": torch.ones(3), "b": [1, "x", None]})
    for candidate in (blob, b"PK\x03\x04" + blob, damaged(data, good)):
        try:
            state.loads(candidate)
        except state.StateError as error:
            assert "\n" not in str(error)
