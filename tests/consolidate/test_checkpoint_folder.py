"""Checkpoints in a folder: names alone determine the newest, and those to keep."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.consolidate import checkpoint_folder, disk
from checkmate.consolidate.assemble import checkpoint
from tests.support.checkpoints import FORMATS, DiskRun, small_checkpoint

NUMBERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, unique=True)


def write_checkpoint(
    folder: Path, generation: int, iteration: int, run: str = "run", kind: disk.Format = "torch"
) -> Path:
    path = checkpoint_folder.checkpoint_path(folder, generation, iteration, kind)
    disk.save({**small_checkpoint(1), "run": run}, path, kind)
    return path


@settings(max_examples=50)
@given(NUMBERS, st.integers(1, 4), st.data())
def test_the_newest_stay_and_the_last_of_each_generation(
    numbers: list[tuple[int, int]], count: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for generation, iteration in numbers:
            path = checkpoint_folder.checkpoint_path(folder, generation, iteration, "torch")
            path.touch()
            os.utime(path, (0, data.draw(st.integers(0, 10**6))))
        in_order = sorted(numbers, reverse=True)
        assert [
            (candidate.generation, candidate.iteration)
            for candidate in checkpoint_folder.list_candidates(folder)
        ] == in_order
        assert checkpoint_folder.greatest_generation(folder) == in_order[0][0]
        newest = data.draw(st.sampled_from(numbers))
        checkpoint_folder.tidy(folder, count, checkpoint_folder.checkpoint_path(folder, *newest, "torch"))
        last = {generation: max(i for g, i in numbers if g == generation) for generation, _ in numbers}
        stay = {*in_order[:count], *last.items(), newest}
        assert {
            (candidate.generation, candidate.iteration)
            for candidate in checkpoint_folder.list_candidates(folder)
        } == stay


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_named_otherwise_or_not_whole_stays(kind: disk.Format, tmp_path: Path) -> None:
    assert checkpoint_folder.list_complete(tmp_path / "nothing") == []
    newest, _ = write_checkpoint(tmp_path, 1, 9, kind=kind), write_checkpoint(tmp_path, 1, 8, kind=kind)
    (tmp_path / "iteration-00000099").mkdir()
    (tmp_path / "other.pt").write_bytes(b"")
    checkpoint_folder.tidy(tmp_path, 1, newest)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [newest.name, "iteration-00000099", "other.pt"]
    )
    assert checkpoint_folder.choices(newest) == [newest]
    stray = tmp_path / "any name"
    stray.write_bytes(b"")
    assert checkpoint_folder.choices(stray) == [stray]
    assert checkpoint_folder.greatest_generation(stray) == checkpoint_folder.greatest_generation(tmp_path)
    assert checkpoint_folder.choices(tmp_path) == [newest, tmp_path / "iteration-00000099"]


def test_names_of_before_there_were_generations_are_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "iteration-00005000.pt").touch()
    old = checkpoint_folder.StoredCheckpoint(0, 5000, tmp_path / "iteration-00005000.pt")
    new = write_checkpoint(tmp_path, 1, 3)
    assert checkpoint_folder.list_candidates(tmp_path) == [checkpoint_folder.StoredCheckpoint(1, 3, new), old]
    assert new.name == "generation-0001-iteration-00000003.pt"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_copy_has_the_order_of_what_was_copied(kind: disk.Format, tmp_path: Path) -> None:
    for numbers in ((1, 900), (2, 3), (2, 40)):
        write_checkpoint(tmp_path / "kept", *numbers, kind=kind)
    shutil.copytree(tmp_path / "kept", tmp_path / "copy", copy_function=shutil.copy)
    in_order = [path.name for path in checkpoint_folder.choices(tmp_path / "kept")]
    assert in_order[0].startswith("generation-0002-iteration-00000040")
    assert [path.name for path in checkpoint_folder.choices(tmp_path / "copy")] == in_order


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_is_kept_under_a_generation_in_which_it_is_the_newest(
    kind: disk.Format, tmp_path: Path
) -> None:
    assert checkpoint_folder.generation_for(tmp_path / "nothing", "first", 1) == 1
    write_checkpoint(tmp_path, 1, 900, "first", kind)
    assert checkpoint_folder.generation_for(tmp_path, "first", 1) == 1
    assert checkpoint_folder.generation_for(tmp_path, "second", 2) == 2
    assert (
        checkpoint_folder.generation_for(tmp_path, "second", 1) == 2
    )  # the node does not know the folder's generations
    write_checkpoint(tmp_path, 2, 3, "second", kind)
    assert checkpoint_folder.generation_for(tmp_path, "second", 1) == 2
    assert checkpoint_folder.generation_for(tmp_path, "first", 1) == 3
    checkpoint_folder.checkpoint_path(tmp_path, 4, 7, kind).mkdir()  # incomplete: its run is unknown
    assert checkpoint_folder.generation_for(tmp_path, "second", 1) == 5


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_run_is_read_without_the_rest(kind: disk.Format, groups: int, tmp_path: Path) -> None:
    path = checkpoint_folder.checkpoint_path(tmp_path, 1, 2, kind)
    disk.save(checkpoint(DiskRun().snapshot(groups), by_name=kind == "dcp"), path, kind)
    assert disk.read_run(path) == "run"
