"""P4Testgen's tests of the Tofino program, as data.

`python -m tests.support.p4.testgen_data FOLDER` writes it again.

P4Testgen (p4c, backends/p4tools) runs a program on symbolic packets and entries. For every path of a packet,
with one entry or none in each table, it writes a test: entries, packet, and outputs. Its Tofino target
generated these tests from `checkmate_tna.p4`:

    p4testgen --target tofino --arch tna --test-backend STF --seed 1 --max-tests 0 \\
        --packet-size-range 512:1024 --port-ranges 1:16,510:510 \\
        --track-coverage STATEMENTS --track-coverage ACTIONS --track-coverage PARSER_STATES \\
        -D__TARGET_TOFINO__=1 -DCHECKMATE_CPU_PORT=510 -I INCLUDE --out-dir FOLDER checkmate_tna.p4 \\
        > FOLDER/testgen.log

INCLUDE has tna.p4. The version was p4c 34b86e9, with these changes in the target:
- A packet with `mcast_grp_a` continues to egress as one copy, with any port and replication id, which the
  trace records. It was dropped before. Fan-out is not modelled.
- `egress_rid` has 16 bits instead of 1.
- `bypass_egress` skips egress for any port, and ports outside of the permitted ranges end the path.
- Values that no path depends on are random instead of 0, so that fields differ.
- Hashes and rewrites of unused intrinsic metadata are omitted: neither changes this program.
P4Testgen masks checksums instead of computing them, and ignores counters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from p4src.compile import sources

DATA = Path(__file__).parents[2] / "data" / "tofino_testgen.json"
LOG = "testgen.log"
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
class GeneratedCase:
    """A test: entries and groups, the input, and the output."""

    entries: list[TableEntry]
    copy: Copy | None
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
    """All tests, with the digest of their program, and their coverage of its nodes."""

    program: str
    covered: int
    nodes: int
    cases: list[GeneratedCase]


def program_digest() -> str:
    """Return the SHA-256 of the Tofino program's sources without comments and white space, in hexadecimal."""
    total = hashlib.sha256()
    for file in sources("tofino"):
        text = re.sub(r"//.*", "", file.read_text())
        total.update(f"{file.name}\0{' '.join(text.split())}\0".encode())
    return total.hexdigest()


def read(file: Path = DATA) -> Suite:
    """Return the committed tests."""
    raw = json.loads(file.read_text())
    cases = [
        GeneratedCase(
            **case
            | {
                "entries": [TableEntry(**entry) for entry in case["entries"]],
                "copy": case["copy"] and Copy(**case["copy"]),
            }
        )
        for case in raw["cases"]
    ]
    return Suite(raw["program"], raw["covered"], raw["nodes"], cases)


def write(suite: Suite, file: Path = DATA) -> None:
    """Write one test per line."""
    head = {"program": suite.program, "covered": suite.covered, "nodes": suite.nodes, "of": list(COVERED)}
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
    return Suite(program_digest(), covered, nodes, [parse(test.read_text()) for test in tests])


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
    return GeneratedCase(
        entries=list(_entries(text)),
        copy=Copy(*map(int, copies.groups())) if copies else None,
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
    sys.stdout.write(f"{len(suite.cases)} tests, {suite.covered} of {suite.nodes} nodes covered: {DATA}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
