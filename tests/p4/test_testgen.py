"""checkmate_v1model.p4 behaves like checkmate_tna.p4 according to P4Testgen, on every path of the latter.

P4Testgen reads the Tofino program's source, without a test bed. Its tests are data (see `testgen_data`), each
with only the entries that its path looks up. Only test_tna.py covers additional lookups, checksums, counters,
meters' rates and fan-out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from finsy.proto import p4i

from p4src import compile
from ptf_tests.stage.tna import device_config, load_halves
from softswitch.codegen.program import Output, Program
from softswitch.program.match import Key, MatchField, MatchKind
from softswitch.program.meters import MeterCell, MeterRates
from softswitch.program.state import Entry, GroupReplica
from tests.softswitch.support.scenarios import CHECKMATE, files, load_program
from tests.support.p4.testgen_data import (
    LOG,
    GeneratedCase,
    Metered,
    TableEntry,
    convert,
    parse,
    read,
    thin,
)

SUITE = read()
TRUNCATED_CASES = [case for case in SUITE.cases if case.cut]
CASES = [case for case in SUITE.cases if not case.cut]
NO_GROUP = [
    case
    for case in CASES
    if any(entry.action == "replicate" and int(entry.params["group"], 16) == 0 for entry in case.entries)
]
"""A segment is replicated to group 0, by an entry that no controller writes."""
RATES = {"green": MeterRates(0, 1, 0, 1), "yellow": MeterRates(0, 0, 0, 1), "red": MeterRates(0, 0, 0, 0)}
"""The rates with which a meter gives its only packet a color."""
FLOOD_GROUP = 1
_ELSEWHERE = 500
"""A port that tests do not use."""


@pytest.fixture(scope="module", params=["v1model", "tna"])
def program(request: pytest.FixtureRequest) -> Program:
    """Return the v1model program or, for comparison, the Tofino program's test bed."""
    return (
        load_program(CHECKMATE)
        if request.param == "v1model"
        else load_halves(device_config(), files(CHECKMATE)[1])
    )


def key(field: MatchField, text: str) -> Key:
    """Return a match in the embedded target's form."""
    if field.kind is MatchKind.EXACT:
        return int(text, 16)
    assert field.kind is MatchKind.TERNARY
    bits = text.removeprefix("0b")
    mask = int(bits.replace("0", "1").replace("*", "0"), 2)
    return (int(bits.replace("*", "0"), 2), mask) if mask else None


def meter(case: GeneratedCase, name: str) -> MeterCell:
    """Return a meter's cell for the case; every other meter than the case's would make a difference."""
    metered = case.metered or Metered("", "green")
    if name == metered.meter:
        return MeterCell(RATES[metered.color])
    return MeterCell(RATES["green" if metered.color == "red" else "red"])


def insert(program: Program, case: GeneratedCase, entry: TableEntry) -> None:
    """Insert an entry of the case into its table."""
    table = next(table for table in program.state.tables.values() if table.name == entry.table)
    action = next(action for action in program.p4info.actions if action.preamble.name == entry.action)
    assert {field.name for field in table.fields} == set(entry.match)
    assert {param.name for param in action.params} == set(entry.params)
    match = tuple(key(field, entry.match[field.name]) for field in table.fields)
    params = tuple(int(entry.params[param.name], 16) for param in action.params)
    inserted = Entry(match, action.preamble.id, params, entry.priority)
    for direct in program.p4info.direct_meters:
        if direct.direct_table_id == table.id:
            inserted.meter = meter(case, direct.preamble.name)
    table.insert(inserted)


def outputs(program: Program, case: GeneratedCase) -> list[Output]:
    """Return the outputs for the case's frame, with only the case's entries and group, and with its meter."""
    for table in program.state.tables.values():
        for match, priority in list(table.entries):
            table.delete(match, priority)
    program.state.groups.clear()
    for entry in case.entries:
        insert(program, case, entry)
    for info in program.p4info.meters:
        program.state.meters[info.preamble.id][case.port] = meter(case, info.preamble.name)
    # Every group has a member, so that an additional copy is sent.
    for group in (FLOOD_GROUP, *(int(entry.params.get("group", "0"), 16) for entry in case.entries)):
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
    masked = [
        digit if expected_digit != "*" else "*"
        for expected_digit, digit in zip(case.leaves_as, frame, strict=False)
    ]
    if outputs[0].port != case.leaves_by or len(frame) != len(case.leaves_as):
        return f"{len(frame) // 2} bytes leave by port {outputs[0].port}"
    return None if "".join(masked) == case.leaves_as else f"{frame} leaves"


def test_the_data_was_made_of_the_program_as_it_is() -> None:
    if SUITE.program != compile.digest("tofino"):
        message = "checkmate_tna.p4 or a file that it includes has changed since P4Testgen made tests of it"
        how = f"{message}: tests/support/p4/testgen_data.py says how to generate them again"
        if shutil.which("p4testgen") is None:
            pytest.skip(f"{how}, which needs p4testgen")
        pytest.fail(how)


def is_tcp(frame: bytes) -> bool:
    """Return whether a frame is an unfragmented TCP segment without IP options."""
    return frame[12:15] == b"\x08\0\x45" and frame[20] & 0x3F == frame[21] == 0 and frame[23] == 6


def test_every_node_of_the_program_is_covered() -> None:
    assert SUITE.covered == SUITE.nodes >= 100
    assert len(CASES) >= 400
    offsets = {int(case.frame[92], 16) for case in CASES if is_tcp(bytes.fromhex(case.frame))}
    assert offsets == set(range(16))


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
    meters = {info.preamble.name for info in program.p4info.meters}
    meters |= {info.preamble.name for info in program.p4info.direct_meters}
    colors = {Metered(name, color) for name in meters for color in ("green", "red")}
    assert colors <= {case.metered for case in SUITE.cases if case.metered}


def test_what_leaves_is_what_p4testgen_says(program: Program) -> None:
    wrong = [(case, problem) for case in CASES if (problem := difference(case, outputs(program, case)))]
    assert not wrong, f"{len(wrong)} of {len(CASES)}, the first: {wrong[0]}"


def test_a_segment_replicated_to_no_group_is_forwarded(program: Program) -> None:
    """Once, as it came, unless its port is the one that means to drop it."""
    forwarded = [case for case in NO_GROUP if case.leaves_by is not None]
    assert forwarded
    for case in NO_GROUP:
        actual = [(output.port, output.frame.hex()) for output in outputs(program, case)]
        assert actual == ([(case.leaves_by, case.frame)] if case in forwarded else [])


def test_masked_are_the_checksums_of_rewritten_copies_alone() -> None:
    for case in SUITE.cases:
        masked = {n // 2 for n, digit in enumerate(case.leaves_as or "") if digit == "*"}
        assert masked in (set(), {24, 25, 50, 51})
        assert not masked or (case.copy and case.copy.replication_id)


def test_the_programs_differ_where_a_frame_ends_within_a_header() -> None:
    """Tofino's parser drops it; v1model's continues with the complete headers, and floods it here."""
    program = load_program(CHECKMATE)
    assert 0 < len(TRUNCATED_CASES) < 10
    for case in TRUNCATED_CASES:
        assert case.leaves_as is None and not case.entries
        outputs(program, case)
        program.state.groups[FLOOD_GROUP] = (GroupReplica(case.port + 1, 0),)
        (output,) = program.process(case.port, bytes.fromhex(case.frame))
        assert output.frame.hex() == case.frame


STF = """\
# [Copy group]: 19
# [Copy port]: 16
# [Copy replication id]: 1265
# [Color from meter client_rate]: 3
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
    assert case.metered == Metered("client_rate", "red")
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


def test_tests_that_differ_only_in_a_data_offset_are_kept_in_turn() -> None:
    generated = [f"# [State] words_{n}\n# [Result]: {hit}\npacket {n} 5639\n" for n in (3, 5) for hit in "ab"]
    generated.append("# [State] with_tag\n# [Result]: a\n")
    assert thin(generated) == [generated[0], generated[3], generated[4]]


def test_a_folder_without_p4testgens_output_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.p4.testgen_data", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert LOG in result.stderr and "Traceback" not in result.stderr
