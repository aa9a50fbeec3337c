"""Report a Tofino's resources that the program uses, from the logs of the compiler.

Usage:
    python -m p4src.report tofino            a table, after `python -m p4src.compile tofino`
    python -m p4src.report tofino --json     the report as JSON
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from p4src import PIPE, tofino

GRESSES = ("ingress", "egress")


@dataclass(frozen=True)
class ChipReport:
    """Resources of a pipe."""

    stages: int
    srams: int
    """Blocks of 1,024 words of 128 bits."""
    tcams: int
    """Blocks of 512 rows of 44 bits."""
    phv_bits: int
    parser_rows: int
    """Rows of each parser."""


CHIPS = {
    "tofino": ChipReport(stages=12, srams=12 * 80, tcams=12 * 24, phv_bits=4096, parser_rows=256),
    "tofino2": ChipReport(stages=20, srams=20 * 80, tcams=20 * 24, phv_bits=5120, parser_rows=256),
}


@dataclass(frozen=True)
class Use:
    """Use of a resource, and its total."""

    what: str
    taken: int
    of: int | None = None

    def text(self) -> str:
        share = f"{self.of:>7,} {100 * self.taken / self.of:6.1f}%" if self.of else ""
        return f"{self.what:<34}{self.taken:>8,} {share}".rstrip()


def read(target: str) -> list[Use]:
    """Return the report.

    Raises:
        OSError: Logs are missing.
        ValueError: Logs are of another compiler; also `LookupError`.
    """
    folder, chip = tofino.output_folder(target) / PIPE / "logs", CHIPS[target]
    resources = json.loads((folder / "resources.json").read_text())["resources"]
    containers = json.loads((folder / "phv.json").read_text())["containers"]
    summary = (folder / "table_summary.log").read_text()
    stages, parsers = resources["mau"]["mau_stages"], resources["parser"]["parsers"]
    rows = {parser["gress"]: parser["states"] for parser in parsers}
    uses = [
        Use(f"{gress} stages", _last(rf"stages for {gress} table allocation: (\d+)", summary), chip.stages)
        for gress in GRESSES
    ]
    uses.append(Use("longest dependency chain, stages", _last(r"Critical path length .*: (\d+)", summary)))
    uses.append(Use("SRAM blocks", sum(len(stage["rams"]["srams"]) for stage in stages), chip.srams))
    uses.append(Use("TCAM blocks", sum(len(stage["tcams"]["tcams"]) for stage in stages), chip.tcams))
    uses.append(Use("PHV bits", sum(map(_bits, containers)), chip.phv_bits))
    for gress in GRESSES:
        states = {row["previous_state_name"] for row in rows[gress]}
        uses.append(Use(f"{gress} parser states", len(states)))
        uses.append(Use(f"{gress} parser rows", len(rows[gress]), chip.parser_rows))
    return uses


def _last(pattern: str, text: str) -> int:
    """Return the number of the last round of table placement."""
    numbers = re.findall(pattern, text)
    if not numbers:
        raise ValueError(f"table_summary.log has no line like {pattern!r}")
    return int(numbers[-1])


def _bits(container: dict[str, Any]) -> int:
    """Return the number of bits of a container in match-action stages; others are not processed there."""
    if container["container_type"] == "tagalong":
        return 0
    spans = [part["slice_info"] for part in container["slices"]]
    return len({bit for span in spans for bit in range(span["lsb"], span["msb"] + 1)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", choices=sorted(CHIPS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args()
    try:
        uses = read(options.target)
    except (OSError, ValueError, LookupError, TypeError) as error:
        logs = Path(getattr(error, "filename", None) or tofino.output_folder(options.target))
        sys.stderr.write(
            f"{logs}: not the logs of a complete compilation ({error}); "
            f"run `python -m p4src.compile {options.target}`\n"
        )
        return 2
    if options.json:
        sys.stdout.write(json.dumps([asdict(use) for use in uses], indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{use.text()}\n" for use in uses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
