"""The demo of the switch: a lab, traffic through it, and the check that nothing was lost or changed.

`python -m topologies.traffic.demo` is `make demo-switch`; `checkmate lab run` is the same with every option.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from topologies import picture
from topologies.controller import serving
from topologies.crew import Crew
from topologies.describe import topology
from topologies.describe.job_files import TARGETS, target_of
from topologies.describe.topology import LabError
from topologies.kernel import loss
from topologies.lab import Lab, down
from topologies.progress import StepProgress
from topologies.signals import unwinding
from topologies.traffic import verdict
from topologies.traffic.orders import Load
from topologies.traffic.run import Outcome, Traffic


def run_lab(lab: Lab, load: Load, console: Console) -> Outcome:
    """Create a lab, drive traffic through it, and remove it; raise `LabError` if that fails."""
    console.print(f"lab {lab.name} on {lab.target}: {lab.topology.title}\n", highlight=False)
    console.print(picture.picture(lab.topology) + "\n", highlight=False, soft_wrap=True)
    with unwinding(), StepProgress(console) as steps:
        lab.report_to(steps)
        try:
            lab.up()
            steps("controller writes the job to the switches")
            crew = Crew(lab)
            with serving(crew):
                return Traffic(crew, load, steps).run()
        finally:
            lab.down()


def show(outcome: Outcome, lab: Lab, console: Console) -> None:
    """Print the streams, the switches' counters, and the verdict in one sentence."""
    console.print()
    console.print(verdict.table(outcome.verdict))
    for switch in outcome.switches:
        console.print(_switch_line(switch), highlight=False)
    for drops in outcome.port_drops:
        console.print(f"[bold]{drops}[/bold]", highlight=False)
    console.print(_ring_line(outcome, lab), highlight=False)
    console.print(_sentence(outcome), highlight=False)


def _switch_line(switch: dict[str, Any]) -> str:
    packets = sum(stream["packets"] for stream in switch["streams"])
    nbytes = sum(stream["bytes"] for stream in switch["streams"])
    lost = ", ".join(f"{n['packets']:,} {name.replace('_', ' ')}" for name, n in switch["losses"].items())
    return (
        f"switch {switch['switch']}: {packets:,} copies sent ({nbytes:,} bytes with headers); "
        f"copies lost: {lost}; plain ACKs dropped: {switch['acks_dropped']:,}"
    )


def _ring_line(outcome: Outcome, lab: Lab) -> str:
    goodput = min(rank["goodput_bits_per_second"] for rank in outcome.ranks) / 1e9
    lossy = f", with {lab.loss:.2%} loss on training links ({lab.loss_by})" if lab.loss else ""
    late = f", {lab.jitter * 1000:g} ms jitter in each direction" if lab.jitter else ""
    again = f"{outcome.retransmitted:,} segments retransmitted{lossy}{late}"
    return f"rings: at least {goodput:.2f} Gbit/s per rank, {again}"


def _sentence(outcome: Outcome) -> str:
    result = outcome.verdict
    equal = sum(row.equal for row in result.rows)
    if outcome.good:
        return (
            f"[bold green]All {equal} shadow streams equal the tagged bytes[/bold green]: "
            f"{result.tagged:,} bytes, each tagged once, SHA-256 taken at both ends."
        )
    said = f"; the tagger failed at: {', '.join(sorted(outcome.faults))}" if outcome.faults else ""
    return (
        f"[bold red]{len(result.rows) - equal} of {len(result.rows)} shadow streams differ[/bold red]{said}"
    )


def perform(lab: Lab, load: Load, *, as_json: bool) -> bool:
    """Run the whole demo, with progress on standard error; return whether all streams are equal."""
    outcome = run_lab(lab, load, Console(stderr=True))
    if as_json:
        print(json.dumps(outcome.data(), indent=2))
    else:
        show(outcome, lab, Console())
    return outcome.good


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every stream is equal at both ends, 1 if not, 2 for an invalid command line."""
    parser = argparse.ArgumentParser(
        prog="python -m topologies.traffic.demo",
        description=__doc__,
        epilog="example: python -m topologies.traffic.demo --target bmv2 --loss 1%%",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "topology", nargs="?", default="single_tor", help=f"{', '.join(topology.names())}, or a .yaml file"
    )
    parser.add_argument("--target", default="softswitch", help=" or ".join(TARGETS))
    parser.add_argument("--megabytes", type=int, default=200, help="of tensors (default: 200)")
    parser.add_argument("--loss", default="0", help="share of frames that training links lose, such as 1%%")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    chosen = parser.parse_args(arguments)
    try:
        lab = Lab(
            topology.load(chosen.topology),
            target_of(chosen.target),
            loss=loss.fraction(chosen.loss),
            name="demo",
        )
        load = Load(nbytes=chosen.megabytes * 1_000_000)
        down(lab.name)  # left by a demo that was killed
        return 0 if perform(lab, load, as_json=chosen.json) else 1
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
