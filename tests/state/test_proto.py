"""The generated protocol code is up to date with its source."""

from __future__ import annotations

from pathlib import Path

from tools.proto import ROOT, SOURCE, generate


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    generate(tmp_path)
    generated = sorted(tmp_path.rglob("shadow_pb2*"))
    assert len(generated) == 4
    for file in generated:
        committed = ROOT / SOURCE.rpartition("/")[0] / file.name
        assert committed.read_text() == file.read_text(), f"{file.name} is stale: run make proto"
