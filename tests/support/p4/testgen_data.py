"""P4Testgen's tests of the Tofino program, as data.

`python -m tests.support.p4.testgen_data FOLDER` writes it again.

P4Testgen (p4c, backends/p4tools) runs a program on symbolic packets and entries. For every path of a packet,
with one entry or none in each table, it writes a test: entries, packet, and outputs. Its Tofino target
generated these tests from `checkmate_tna.p4`:

    p4testgen --target tofino --arch tna --test-backend STF --seed 1 --max-tests 0 \\
        --packet-size-range 512:1024 --port-ranges 1:16,510:510 \\
        --track-coverage STATEMENTS --track-coverage ACTIONS --track-coverage PARSER_STATES \\
        -D__TARGET_TOFINO__=1 -DCHECKMATE_CPU_PORT=510 -DIN_TCAM= -I INCLUDE --out-dir FOLDER \\
        checkmate_tna.p4 > FOLDER/testgen.log 2>&1

INCLUDE has tna.p4. `IN_TCAM` is empty, because P4Testgen makes ternary entries for an exact table in TCAM.
The version was p4c 34b86e9, with these changes in the target:
- A packet with `mcast_grp_a` continues to egress as one copy, with any port and replication id, which the
  trace records. It was dropped before. Fan-out is not modelled.
- `egress_rid` has 16 bits instead of 1.
- `bypass_egress` skips egress for any port, and ports outside of the permitted ranges end the path.
- A meter gives any color, which the trace records with the meter. It was green before.
- Values that no path depends on are random instead of 0, so that fields differ.
- Hashes and rewrites of unused intrinsic metadata are omitted: neither changes this program.
P4Testgen masks checksums instead of computing them, and ignores counters.

The parser has a state for each TCP data offset, and P4Testgen repeats all that follows for each. It never
frees memory, and all paths need more than 16 GB. So it ran once for each of these 16 states, within 7 GB, on
a copy whose parser has only this one; only the copy with `words_0` has ARP and VLANs. FOLDER has the tests of
that copy, except those of other offsets, and of each other copy those that reach its state, numbered
throughout. The last line of its log has the nodes that all copies cover together.

Of tests that differ only in a data offset without tag, one is kept: each time with the next of these 14.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from p4src.compile import digest

DATA = Path(__file__).parents[2] / "data" / "tofino_testgen.json"
LOG = "testgen.log"
COLORS = {0: "green", 1: "yellow", 3: "red"}
COVERED = ("statements", "actions", "parser states")


@dataclass(frozen=True)
class TableEntry:
    """One entry, by names. Values are hexadecimal; ternary keys are binary, with `*` for any bit."""

    table: str
    match: dict[str, str]
    action: str
    params: dict[str, str]
    priority: int = 0


@dataclass(frozen=True)
class Copy:
    """The only copy of a multicast group."""

    group: int
    port: int
    replication_id: int


@dataclass(frozen=True)
class Metered:
    """The color that a meter gives the packet: green, yellow or red."""

    meter: str
    color: str


@dataclass(frozen=True)
class GeneratedCase:
    """A test: entries, group and meter, the input, and the output."""

    entries: list[TableEntry]
    copy: Copy | None
    metered: Metered | None
    port: int
    frame: str
    """Hexadecimal."""
    leaves_by: int | None
    leaves_as: str | None
    """Hexadecimal, with `*` for an undefined digit; `None` without an output."""
    cut: bool
    """Whether the frame ends within a header, so that Tofino's parser drops it."""


@dataclass(frozen=True)
class Suite:
    """The tests kept of all, with the digest of their program, and the coverage of its nodes."""

    program: str
    covered: int
    nodes: int
    generated: int
    cases: list[GeneratedCase]


def read(file: Path = DATA) -> Suite:
    """Return the committed tests."""
    raw = json.loads(file.read_text())
    cases = [
        GeneratedCase(
            **case
            | {
                "entries": [TableEntry(**entry) for entry in case["entries"]],
                "copy": case["copy"] and Copy(**case["copy"]),
                "metered": case["metered"] and Metered(**case["metered"]),
            }
        )
        for case in raw["cases"]
    ]
    return Suite(raw["program"], raw["covered"], raw["nodes"], raw["generated"], cases)


def write(suite: Suite, file: Path = DATA) -> None:
    """Write one test per line."""
    head = {
        "program": suite.program,
        "covered": suite.covered,
        "nodes": suite.nodes,
        "of": list(COVERED),
        "generated": suite.generated,
    }
    lines = ",\n".join(json.dumps(asdict(case)) for case in suite.cases)
    file.write_text(f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n')


def convert(folder: Path) -> Suite:
    """Return the tests in P4Testgen's output; raise `ValueError` for another folder."""
    log = folder / LOG
    tests = sorted(folder.glob("*.stf"), key=lambda file: int(file.stem.rpartition("_")[2]))
    progress = re.findall(r"Nodes covered: \S+ \((\d+)/(\d+)\)", log.read_text() if log.exists() else "")
    if not tests or not progress:
        raise ValueError(f"{folder}: P4Testgen's *.stf and what it printed, as {LOG}, should be here")
    covered, nodes = map(int, progress[-1])
    chosen_texts = thin([test.read_text() for test in tests])
    return Suite(digest("tofino"), covered, nodes, len(tests), [parse(text) for text in chosen_texts])


def thin(tests: list[str]) -> list[str]:
    """Return the tests without those that differ from another only in a data offset without tag."""
    alike: dict[tuple[str, int], list[int]] = {}
    visits: Counter[tuple[str, str]] = Counter()
    for at, text in enumerate(tests):
        if offset := re.search(r"^# \[State\] words_\d+$", text, re.MULTILINE):
            trace = "".join(re.findall(r"^# \[.*\n", text, re.MULTILINE))
            path = re.sub(r"0x[0-9A-F_]+|\d+", "#", trace)
            # Paths with the same trace, such as those of a saturated result, are apart by their order.
            alike.setdefault((path, visits[path, offset[0]]), []).append(at)
            visits[path, offset[0]] += 1
    groups = list(alike.values())
    indices = {group[turn % len(group)] for turn, group in enumerate(groups)}
    dropped = {at for group in groups for at in group} - indices
    return [text for at, text in enumerate(tests) if at not in dropped]


def parse(text: str) -> GeneratedCase:
    """Return one test, from P4Testgen's STF."""
    packet = re.search(r"^packet (\d+) ([0-9A-F]+)$", text, re.MULTILINE)
    if packet is None:
        raise ValueError(f"not a test of P4Testgen: {text[:80]!r}")
    expect = re.search(r"^expect (\d+) ([0-9A-F*]+)\$$", text, re.MULTILINE)
    copies = re.search(
        r"^# \[Copy group\]: (\d+)\n# \[Copy port\]: (\d+)\n# \[Copy replication id\]: (\d+)$",
        text,
        re.MULTILINE,
    )
    metered = re.search(r"^# \[Color from meter \.?(\w+)\]: (\d+)$", text, re.MULTILINE)
    return GeneratedCase(
        entries=list(_entries(text)),
        copy=Copy(*map(int, copies.groups())) if copies else None,
        metered=Metered(metered[1], COLORS[int(metered[2])]) if metered else None,
        port=int(packet[1]),
        frame=packet[2].lower(),
        leaves_by=int(expect[1]) if expect else None,
        leaves_as=expect[2].lower() if expect else None,
        cut="[ExtractFailure]" in text,
    )


def _entries(text: str) -> Iterator[TableEntry]:
    for table, rest, action, params in re.findall(r"^add (\S+) (.*?)(\w+)\((.*)\)$", text, re.MULTILINE):
        *priority, match = rest.split(" ", 1) if re.match(r"\d+ ", rest) else [rest]
        yield TableEntry(
            table,
            dict(part.split(":") for part in match.split()),
            action,
            dict(part.split(":") for part in params.split(",") if part),
            int(priority[0]) if priority else 0,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what P4Testgen wrote")
    options = parser.parse_args()
    try:
        suite = convert(options.folder)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    write(suite)
    sys.stdout.write(
        f"{len(suite.cases)} of {suite.generated} tests kept, "
        f"{suite.covered} of {suite.nodes} nodes covered: {DATA}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
