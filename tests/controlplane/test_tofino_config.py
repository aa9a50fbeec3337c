"""A Tofino's program, packed: the compiler's output in the formats of both P4Runtime servers."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import unknown_fields
from hypothesis import given, settings
from hypothesis import strategies as st

import p4src
from controlplane.p4runtime import codec as codecs
from controlplane.p4runtime.codec import Codec, compiled_files
from controlplane.tofino.device_config import (
    NotCompiled,
    PackedPipeline,
    PackedProgram,
    pack,
    read_program,
    stratum_message,
)
from p4src import sde_install
from tests.support.controlplane.tofino import write_compiled

few = settings(max_examples=40)
programs = st.builds(
    PackedProgram,
    st.text(min_size=1, max_size=20),
    st.binary(max_size=50),
    st.tuples(
        st.builds(
            PackedPipeline,
            st.text(max_size=10),
            st.binary(max_size=300),
            st.binary(max_size=300),
            st.lists(st.integers(0, 3), unique=True).map(tuple),
        )
    ),
)


def unpack_pi(blob: bytes) -> tuple[bytes, ...]:
    """Return the parts of PI's form; raise `ValueError` if it is incomplete."""
    parts = []
    while blob:
        if len(blob) < 4 or len(blob) - 4 < (length := struct.unpack_from("<I", blob)[0]):
            raise ValueError("cut short")
        parts.append(blob[4 : 4 + length])
        blob = blob[4 + length :]
    if len(parts) != 5:
        raise ValueError("cut short")
    return tuple(parts)


@given(programs)
@few
def test_pi_form_is_five_parts_each_after_its_length(program: PackedProgram) -> None:
    """PI reads the fourth and fifth too, beyond the end if they are missing."""
    blob = pack(program, "pi")
    (pipeline,) = program.pipelines
    name, binary, context, pipeline_name, schema = unpack_pi(blob)
    assert (name, binary, context) == (program.name.encode(), pipeline.binary, pipeline.context)
    assert (pipeline_name, schema) == (pipeline.name.encode(), program.bfrt)
    assert blob[:4] == len(program.name.encode()).to_bytes(4, "little")
    for length in {1, 3, len(blob) // 2, len(blob) - 1}:
        with pytest.raises(ValueError, match="cut short|not enough|expected"):
            unpack_pi(blob[:length])


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field, as in protobuf's encoding guide."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value if value else b""


@given(programs)
@few
def test_stratums_form_is_its_message_on_the_wire(program: PackedProgram) -> None:
    """Encoded by hand with bf.proto's field numbers, without our descriptor."""
    (pipeline,) = program.pipelines
    profile = (
        _field(1, pipeline.name.encode())
        + _field(2, pipeline.context)
        + _field(3, pipeline.binary)
        + _field(4, b"".join(_varint(pipe) for pipe in pipeline.scope))
    )
    expected = _field(1, program.name.encode()) + _field(2, program.bfrt)
    expected += _varint(3 << 3 | 2) + _varint(len(profile)) + profile
    blob = pack(program, "stratum")
    assert blob == expected
    message = stratum_message()
    message.ParseFromString(blob)
    assert not unknown_fields.UnknownFieldSet(message)
    assert message.profiles[0].binary == pipeline.binary


def test_what_the_compiler_leaves_is_read(tmp_path: Path) -> None:
    write_compiled(tmp_path, "tofino", b"\0binary", b'{"context": 1}')
    program = read_program("tofino", tmp_path)
    assert program.name == "checkmate_tna"
    assert program.pipelines == (PackedPipeline("pipe", b"\0binary", b'{"context": 1}', (0, 1, 2, 3)),)


@pytest.mark.parametrize("missing", ["checkmate_tna.conf", "context.json", "tofino.bin", "bf-rt.json"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    write_compiled(tmp_path, "tofino", b"binary", b"{}")
    (file,) = tmp_path.rglob(missing)
    file.unlink()
    with pytest.raises(NotCompiled, match=r"run `python -m p4src.compile tofino`") as error:
        read_program("tofino", tmp_path)
    assert str(file) in str(error.value)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    "conf",
    ["{", "[]", "{}", '{"p4_devices": []}', '{"p4_devices": [{"p4_programs": [{}]}]}', '{"p4_devices": 3}'],
)
def test_what_is_no_conf_is_refused(tmp_path: Path, conf: str) -> None:
    file = write_compiled(tmp_path, "tofino", b"binary", b"{}")
    file.write_text(conf)
    with pytest.raises(NotCompiled, match="isn't what the compiler writes"):
        read_program("tofino", tmp_path)


def test_pi_takes_one_pipeline() -> None:
    pipeline = PackedPipeline("a", b"", b"", (0,))
    with pytest.raises(NotCompiled, match="one pipeline"):
        pack(PackedProgram("p", b"", (pipeline, pipeline)), "pi")


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of committed output with a P4Info of Checkmate's tables; the SDE lacks the program."""
    folder = tmp_path / "build"
    folder.mkdir()
    shutil.copy(compiled_files("bmv2")[0], folder / "checkmate_tna.p4info.txtpb")
    monkeypatch.setattr(codecs, "artifacts", lambda _: folder)
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path / "sde"))
    return folder


def test_a_codec_loads_the_program_once_it_is_compiled(artifacts: Path) -> None:
    codec = Codec.for_target("tofino")
    assert codec.cookie is None
    with pytest.raises(NotCompiled, match="p4src.compile"):
        codec.pipeline_config()
    write_compiled(sde_install(), "tofino", b"binary", b"{}")
    for server in ("stratum", "pi"):
        config = Codec.for_target("tofino", server).pipeline_config()
        assert config.p4_device_config == pack(read_program("tofino"), server)
        assert config.p4info.tables
    assert Codec.for_target("tofino").cookie != Codec.for_target("tofino", "pi").cookie


def test_without_a_p4info_it_plans_but_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = p4src.artifacts
    for module in (p4src, codecs):
        monkeypatch.setattr(module, "artifacts", lambda t="bmv2": tmp_path if t == "tofino" else usual(t))
    write_compiled(tmp_path / "sde", "tofino", b"binary", b"{}")
    monkeypatch.setenv("SDE_INSTALL", str(tmp_path / "sde"))
    codec = Codec.for_target("tofino")
    assert p4src.table_sizes("tofino") == p4src.table_sizes("bmv2")
    assert codec.cookie is None
    with pytest.raises(NotCompiled, match=r"p4info.txtpb is missing; `python -m p4src.compile tofino`"):
        codec.pipeline_config()


def _compiled_here(target: str) -> PackedProgram | None:
    try:
        return read_program(target)
    except NotCompiled:
        return None


@pytest.mark.parametrize("target", ["tofino", "tofino2"])
def test_the_real_compilers_output(target: str) -> None:
    program = _compiled_here(target)
    if program is None:
        pytest.skip(f"nothing is compiled for {target} here: that takes p4c's Tofino backend")
    assert program.name == "checkmate_tna"
    (pipeline,) = program.pipelines
    tables: dict[str, Any] = json.loads(program.bfrt)
    assert any(table["name"].endswith("streams") for table in tables["tables"])
    assert unpack_pi(pack(program, "pi"))[1] == pipeline.binary
    json.loads(pipeline.context)
