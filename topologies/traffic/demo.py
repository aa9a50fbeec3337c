"""The demo of the switch: a lab, traffic through it, and the check that nothing was lost or changed.

`checkmate lab run` is this, and so is `make demo-switch`.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from checkmate.output.consoles import text_console
from topologies import picture
from topologies.crew import Crew, serving
from topologies.lab import Lab
from topologies.progress import StepProgress
from topologies.signals import unwinding
from topologies.traffic import verdict
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic, TrafficOutcome


def run_lab(lab: Lab, load: Load, console: Console) -> TrafficOutcome:
    """Create a lab, drive traffic through it, and remove it; raise `LabError` if that fails."""
    console.print(f"lab {lab.name} on {lab.target}: {lab.topology.title}\n", highlight=False)
    picture.show(lab.topology, console)
    console.print()
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


def show(outcome: TrafficOutcome, lab: Lab, console: Console) -> None:
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
    losses = ", ".join(f"{n['packets']:,} {name.replace('_', ' ')}" for name, n in switch["losses"].items())
    return (
        f"switch {switch['switch']}: {packets:,} copies sent ({nbytes:,} bytes with headers); "
        f"copies lost: {losses}; plain ACKs dropped: {switch['acks_dropped']:,}"
    )


def _ring_line(outcome: TrafficOutcome, lab: Lab) -> str:
    goodput = min(rank["goodput_bits_per_second"] for rank in outcome.ranks) / 1e9
    lossy = f", with {lab.loss:.2%} loss on training links ({lab.loss_by})" if lab.loss else ""
    late = f", {lab.jitter * 1000:g} ms jitter in each direction" if lab.jitter else ""
    again = f"{outcome.retransmitted:,} segments retransmitted{lossy}{late}"
    return f"rings: at least {goodput:.2f} Gbit/s per rank, {again}"


def _sentence(outcome: TrafficOutcome) -> str:
    result = outcome.verdict
    equal = sum(row.equal for row in result.rows)
    if outcome.good:
        return (
            f"[bold green]All {equal} shadow streams equal the tagged bytes[/bold green]: "
            f"{result.tagged:,} bytes, each tagged once, SHA-256 taken at both ends."
        )
    tagger_faults = f"; the tagger failed at: {', '.join(sorted(outcome.faults))}" if outcome.faults else ""
    differing = f"{len(result.rows) - equal} of {len(result.rows)} shadow streams differ"
    return f"[bold red]{differing}[/bold red]{tagger_faults}"


def perform(lab: Lab, load: Load, *, as_json: bool) -> bool:
    """Run the whole demo, with progress on standard error; return whether all streams are equal."""
    outcome = run_lab(lab, load, text_console(stderr=True))
    if as_json:
        print(json.dumps(outcome.data(), indent=2))
    else:
        show(outcome, lab, text_console())
    return outcome.good
