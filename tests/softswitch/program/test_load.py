"""Loading: refused programs with their messages, and the state of a new program."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from finsy.proto import p4i

from softswitch.codegen.program import UnsupportedProgramError, load
from softswitch.program.state import Entry, StatusError
from tests.softswitch.support.scenarios import CHECKMATE, EXAMPLES, files, load_program

PROGRAMS = Path(__file__).parents[1] / "programs"

PROBLEMS = [
    "header stack stack is not supported",
    "parser value set read.known is not supported",
    "unsupported.p4:72: digest metadata_t is not supported",
    "varbit field rest of label_t is not supported",
    "unsupported.p4:70: primitive modify_field_rng_uniform is not supported (random(meta.drawn, 0, 9))",
    "unsupported.p4:72: primitive generate_digest is not supported (digest<metadata_t>(1, meta))",
    "unsupported.p4:73: primitive clone_ingress_pkt_to_egress is not supported "
    "(clone_preserving_field_list(CloneType.I2E, 5, 1))",
    "unsupported.p4:74: primitive resubmit is not supported (resubmit_preserving_field_list(1))",
    "unsupported.p4:75: primitive truncate is not supported (truncate(64))",
    "unsupported.p4:77: primitive assert is not supported (assert(hdr.word.isValid()))",
    "unsupported.p4:83: primitive recirculate is not supported (recirculate_preserving_field_list(1))",
    "a transition on a parse_vset is not supported",
    "parser operation extract_VL is not supported",
    "unsupported.p4:52: action profile ingress.members is not supported",
    "unsupported.p4:56: table ingress.balanced of type indirect_ws is not supported",
    "unsupported.p4:61: the idle timeout of table ingress.aging is not supported",
]


def test_everything_unsupported_is_named_at_once() -> None:
    with pytest.raises(UnsupportedProgramError) as error:
        load_program(PROGRAMS / "unsupported")
    assert error.value.problems == PROBLEMS
    assert str(error.value).splitlines()[1:] == [f"  {problem}" for problem in PROBLEMS]


def with_change(old: str, new: str) -> tuple[bytes, p4i.P4Info]:
    """Return the counter program with a piece of its JSON replaced."""
    config, p4info = files(EXAMPLES / "counter")
    text = json.dumps(json.loads(config))
    assert old in text
    return text.replace(old, new).encode(), p4info


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"op": "sat_cast"', '"op": "frob"', "counter.p4:74: operator frob is not supported"),
        ('"op": "register_read"', '"op": "frob"', "counter.p4:62: primitive frob is not supported"),
        ('"op": "advance"', '"op": "frob"', "parser operation frob is not supported"),
        ('"op": "mark_to_drop"', '"op": "_jump"', "a jump outside of an if-else is not supported"),
        (
            '["packets", 32, false]',
            '["packets", 33, false]',
            "header count is 113 bits wide, not whole bytes",
        ),
        ('["standard_metadata", "egress_spec"]', '["standard_metadata", "priority"]', "priority queues"),
    ],
)
def test_each_kind_of_construct_is_checked(old: str, new: str, problem: str) -> None:
    with pytest.raises(UnsupportedProgramError) as error:
        load(*with_change(old, new))
    assert any(problem in text for text in error.value.problems), error.value.problems


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\x00\x01", "is not JSON"),
        (b"[]", "not BMv2 JSON (of p4c-bm2-ss): it has no 'pipelines'"),
        (b'{"pipelines": []}', "it must be an object with 'header_types'"),
    ],
)
def test_what_is_no_bmv2_json_is_said_so(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match="device config") as error:
        load(text, p4i.P4Info())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "lacks"),
    [
        ('["ingress_port", 9, false]', '["x", 9, false]', "ingress_port of 9 bits"),
        ('["parser_error", 32, false]', '["parser_error", 31, false]', "parser_error of 32 bits"),
    ],
)
def test_standard_metadata_is_v1models(old: str, new: str, lacks: str) -> None:
    with pytest.raises(ValueError, match=f"standard_metadata has no field {lacks}: it is not compiled for"):
        load(*with_change(old, new))


def test_json_and_p4info_of_two_programs_dont_go_together() -> None:
    config, counter_info = files(EXAMPLES / "counter")
    _, ecmp_info = files(EXAMPLES / "ecmp")
    with pytest.raises(ValueError, match="don't belong together: .*counter ingress.totals"):
        load(config, ecmp_info)
    renamed = p4i.P4Info()
    renamed.CopyFrom(counter_info)
    renamed.tables[0].preamble.name = "other"
    with pytest.raises(ValueError, match="P4Info has a table other that the JSON lacks"):
        load(config, renamed)
    renamed.CopyFrom(counter_info)
    del renamed.tables[0]
    with pytest.raises(ValueError, match="the JSON has a table ingress.ports that the P4Info lacks"):
        load(config, renamed)
    renamed.CopyFrom(counter_info)
    renamed.tables[0].match_fields[0].match_type = p4i.MatchField.LPM
    with pytest.raises(ValueError, match="is exact in the JSON, lpm in the P4Info"):
        load(config, renamed)
    renamed.CopyFrom(counter_info)
    next(a for a in renamed.actions if a.preamble.name == "ingress.push").params[0].bitwidth = 8
    with pytest.raises(ValueError, match=r"action ingress\.push has parameters"):
        load(config, renamed)


def test_constant_entries_and_defaults_are_there() -> None:
    program = load_program(EXAMPLES / "counter")
    (table,) = program.state.tables.values()
    # In the P4 source the first entry wins; in P4Runtime the highest priority.
    assert [entry.priority for entry in table.entries.values()] == [3, 2, 1]
    assert [entry.match for entry in table.entries.values()] == [
        (7, 0, (0x010000000000, 0x010000000000)),
        (7, 0, None),
        (8, 1, None),
    ]
    assert table.const_entries
    assert table.const_default
    assert table.default is table.initial_default is not None
    with pytest.raises(StatusError, match="constant entries"):
        table.insert(Entry((1, 0, None), 1, (), 5))
    checkmate = load_program(CHECKMATE)
    assert {t.name for t in checkmate.state.tables.values() if t.const_default} == {
        t.preamble.name for t in checkmate.p4info.tables
    }
    assert not any(t.const_entries or t.entries for t in checkmate.state.tables.values())


def test_the_program_shows_its_source() -> None:
    assert "def process(port, frame, trace):" in load_program(CHECKMATE).source


COMPILED = [EXAMPLES / name for name in ("l3_forward", "ecmp", "counter")]
COMPILED += [PROGRAMS / name for name in ("operators", "unsupported")]


@pytest.mark.skipif(shutil.which("p4c-bm2-ss") is None, reason="p4c-bm2-ss is not on PATH")
@pytest.mark.parametrize("base", COMPILED, ids=lambda base: base.name)
def test_what_is_committed_is_what_p4c_makes(base: Path, tmp_path: Path) -> None:
    compiler = Path(shutil.which("p4c-bm2-ss") or "").resolve()
    include = compiler.parent.parent / "share" / "p4c" / "p4include"
    options = ["-I", str(include), "--std", "p4-16", "--p4runtime-files", str(tmp_path / "p4info.txtpb")]
    command = [str(compiler), *options, "-o", str(tmp_path / "json"), base.name + ".p4"]
    subprocess.run(command, cwd=base.parent, check=True, capture_output=True)
    made_json = json.loads((tmp_path / "json").read_bytes())
    assert made_json == json.loads(base.with_name(base.name + ".json").read_bytes())
    assert (tmp_path / "p4info.txtpb").read_text() == base.with_name(base.name + ".p4info.txtpb").read_text()
