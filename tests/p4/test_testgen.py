"""checkmate_v1model.p4 behaves like checkmate_tna.p4 according to P4Testgen, on every path of the latter.

P4Testgen reads the Tofino program's source, without a test bed. Its tests are data (see `testgen_data`), each
with only the entries that its path looks up. Only test_tna.py covers additional lookups, checksums, counters
and fan-out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from finsy.proto import p4i

from ptf_tests.stage.tna import TnaProgram, device_config, load_halves
from softswitch.codegen.program import Output, Program
from softswitch.program.match import Key, MatchField, MatchKind
from softswitch.program.state import Entry, GroupReplica
from tests.softswitch.support.scenarios import CHECKMATE, files, made
from tests.support.p4.testgen_data import LOG, GeneratedCase, TableEntry, convert, parse, program_digest, read

SUITE = read()
CUT = [case for case in SUITE.cases if case.cut]
NO_GROUP = [
    case
    for case in SUITE.cases
    if any(entry.action == "replicate" and int(entry.params["group"], 16) == 0 for entry in case.entries)
]
"""A segment is replicated to group 0, by an entry that no controller writes."""
CASES = [case for case in SUITE.cases if case not in CUT and case not in NO_GROUP]
FLOOD_GROUP = 1
_ELSEWHERE = 500
"""A port that tests do not use."""


@pytest.fixture(scope="module", params=["v1model", "tna"])
def program(request: pytest.FixtureRequest) -> Program:
    """Return the v1model program or, for comparison, the Tofino program's test bed."""
    return (
        made(CHECKMATE) if request.param == "v1model" else load_halves(device_config(), files(CHECKMATE)[1])
    )


def key(field: MatchField, text: str) -> Key:
    """Return a match in the embedded target's form."""
    if field.kind is MatchKind.EXACT:
        return int(text, 16)
    assert field.kind is MatchKind.TERNARY
    bits = text.removeprefix("0b")
    mask = int(bits.replace("0", "1").replace("*", "0"), 2)
    return (int(bits.replace("*", "0"), 2), mask) if mask else None


def insert(program: Program, entry: TableEntry) -> None:
    """Insert an entry into its table."""
    table = next(table for table in program.state.tables.values() if table.name == entry.table)
    action = next(action for action in program.p4info.actions if action.preamble.name == entry.action)
    assert {field.name for field in table.fields} == set(entry.match)
    assert {param.name for param in action.params} == set(entry.params)
    match = tuple(key(field, entry.match[field.name]) for field in table.fields)
    params = tuple(int(entry.params[param.name], 16) for param in action.params)
    table.insert(Entry(match, action.preamble.id, params, entry.priority))


def outputs(program: Program, case: GeneratedCase) -> list[Output]:
    """Return the outputs for the case's frame, with only the case's entries and group."""
    for table in program.state.tables.values():
        for match, priority in list(table.entries):
            table.delete(match, priority)
    program.state.groups.clear()
    for entry in case.entries:
        insert(program, entry)
    # Every group has a member, so that an additional copy is sent.
    for group in (FLOOD_GROUP, *(int(each.params.get("group", "0"), 16) for each in case.entries)):
        program.state.groups[group] = (GroupReplica(_ELSEWHERE, 0),)
    program.state.groups.pop(0, None)
    if case.copy is not None:
        program.state.groups[case.copy.group] = (GroupReplica(case.copy.port, case.copy.replication_id),)
    return program.process(case.port, bytes.fromhex(case.frame))


def difference(case: GeneratedCase, outputs: list[Output]) -> str | None:
    """Return the difference to P4Testgen's outputs, or `None`."""
    if case.leaves_as is None:
        return f"{outputs} leaves, and nothing should" if outputs else None
    if len(outputs) != 1:
        return f"{len(outputs)} frames leave"
    frame = outputs[0].frame.hex()
    masked = [digit if said != "*" else "*" for said, digit in zip(case.leaves_as, frame, strict=False)]
    if outputs[0].port != case.leaves_by or len(frame) != len(case.leaves_as):
        return f"{len(frame) // 2} bytes leave by port {outputs[0].port}"
    return None if "".join(masked) == case.leaves_as else f"{frame} leaves"


def test_the_data_was_made_of_the_program_as_it_is() -> None:
    assert SUITE.program == program_digest(), (
        "checkmate_tna.p4 or a file that it includes has changed since P4Testgen made tests of it: "
        "see tests/support/p4/testgen_data.py for how to generate them again"
    )


def test_every_node_of_the_program_is_covered() -> None:
    assert SUITE.covered == SUITE.nodes >= 100
    assert len(CASES) >= 400


def test_the_data_reaches_every_table_and_action(program: Program) -> None:
    entries = [entry for case in SUITE.cases for entry in case.entries]
    assert {entry.table for entry in entries} == {table.name for table in program.state.tables.values()}
    assert {entry.action for entry in entries} == {
        action.preamble.name
        for action in program.p4info.actions
        for table in program.p4info.tables
        for ref in table.action_refs
        if ref.id == action.preamble.id and ref.scope != p4i.ActionRef.DEFAULT_ONLY
    }
    assert any(case.copy and case.copy.replication_id and case.leaves_as for case in SUITE.cases)


def test_what_leaves_is_what_p4testgen_says(program: Program) -> None:
    wrong = [(case, found) for case in CASES if (found := difference(case, outputs(program, case)))]
    assert not wrong, f"{len(wrong)} of {len(CASES)}, the first: {wrong[0]}"


def test_the_programs_differ_where_a_segment_is_replicated_to_no_group(program: Program) -> None:
    """Tofino's program forwards it without replication, v1model's sends it to port 0."""
    assert 0 < len(NO_GROUP) < 10
    for case in NO_GROUP:
        found = outputs(program, case)
        assert (difference(case, found) is None) == isinstance(program, TnaProgram)
        assert all(output.frame.hex() == case.frame for output in found)


def test_masked_are_the_checksums_of_rewritten_copies_alone() -> None:
    for case in SUITE.cases:
        masked = {n // 2 for n, digit in enumerate(case.leaves_as or "") if digit == "*"}
        assert masked in (set(), {24, 25, 50, 51})
        assert not masked or (case.copy and case.copy.replication_id)


def test_the_programs_differ_where_a_frame_ends_within_a_header() -> None:
    """Tofino's parser drops it; v1model's continues with the complete headers, and floods it here."""
    program = made(CHECKMATE)
    assert 0 < len(CUT) < 10
    for case in CUT:
        assert case.leaves_as is None and not case.entries
        outputs(program, case)
        program.state.groups[FLOOD_GROUP] = (GroupReplica(case.port + 1, 0),)
        (output,) = program.process(case.port, bytes.fromhex(case.frame))
        assert output.frame.hex() == case.frame


STF = """\
# [Copy group]: 19
# [Copy port]: 16
# [Copy replication id]: 1265
# Table marks
add marks 1 dscp:0b*1*01* mark()

add replication source:0x0A000001 channel:0x17 replicate(group:0x0013,boundary:0xFD24)

packet 4 5639A8ED
expect 16 07****28$
"""


def test_p4testgens_output_is_read_as_it_is_written(tmp_path: Path) -> None:
    case = parse(STF)
    assert case.entries == [
        TableEntry("marks", {"dscp": "0b*1*01*"}, "mark", {}, 1),
        TableEntry(
            "replication",
            {"source": "0x0A000001", "channel": "0x17"},
            "replicate",
            {"group": "0x0013", "boundary": "0xFD24"},
        ),
    ]
    assert case.copy is not None and case.copy.replication_id == 1265
    assert (case.port, case.frame) == (4, "5639a8ed")
    assert (case.leaves_by, case.leaves_as, case.cut) == (16, "07****28", False)
    dropped = parse(STF[: STF.index("expect")] + "# [ExtractFailure] hdr.tag@528")
    assert dropped.leaves_as is None and dropped.cut
    (tmp_path / LOG).write_text(
        "== Test 1: Nodes covered: 0.5 (2/4) ==\n== Test 2: Nodes covered: 1 (4/4) ==\n"
    )
    for number in (10, 2):
        (tmp_path / f"checkmate_tna_{number}.stf").write_text(STF.replace("packet 4", f"packet {number}"))
    suite = convert(tmp_path)
    assert (suite.covered, suite.nodes, [case.port for case in suite.cases]) == (4, 4, [2, 10])


def test_a_folder_without_p4testgens_output_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.p4.testgen_data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert LOG in done.stderr and "Traceback" not in done.stderr
