"""The report of a run, as a table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.chaos.run import TrialOutcome
from tests.chaos.scenario import Scenario


def describe(scenario: Scenario) -> list[tuple[str, str]]:
    """Return the description of a scenario, line by line."""
    model, network = scenario.model, scenario.network
    nics = ", ".join(map(str, network.nodes))
    options = ", ".join(f"{key}={value}" for key, value in model.options.items())
    extras = [f"switches {network.switches}", f"channels {network.channels}", f"replicas {network.replicas}"]
    extras += [f"shards {network.shards}"] if network.shards > 1 else []
    extras += ["together"] if network.together else []
    extras += ["copies by hosts"] if network.copies == "host" else []
    extras += [f"recovery {network.recovery}"] if network.in_place else []
    extras += ["keeping"] if network.keeping else []
    extras += [f"loss {network.loss:g}"] if network.loss else []
    extras += [f"loss of copies {network.copy_loss:g}"] if network.copy_loss else []
    extras += ["trees"] if network.trees else []
    extras += [f"consolidate --every {network.every}"] if network.every else []
    training = [f"{model.iterations} iterations", f"pause {model.pause:g} s", f"boundary {model.boundary}"]
    training += [f"clip {model.clip:g} (norm {model.clip_norm:g})"] if model.clip else []
    training += [f"precision {model.precision}"] if model.precision != "fp32" else []
    training += [f"accumulate {model.accumulate}"] if model.accumulate > 1 else []
    return [
        (
            "network",
            f"ranks {network.ranks}, shards {network.shards}, nodes with {nics} NICs, " + ", ".join(extras),
        ),
        ("model", f"width {model.width}, " + ", ".join((*model.parts, *model.turned)) or "plain"),
        ("optimizer", f"{model.optimizer}({options}), schedule {model.schedule}"),
        ("training", ", ".join(training)),
        ("events", "; ".join(map(str, scenario.events)) or "none"),
    ]


def table(outcome: TrialOutcome) -> str:
    """Return a table of one scenario."""
    verdict = "pass" if outcome.has_passed else "FAIL"
    rows = [("seed", str(outcome.scenario.seed)), *describe(outcome.scenario)]
    rows += [("happened", line) for line in outcome.happened]
    rows += [("promised", line) for line in outcome.promises]
    rows += [("seen", line) for line in outcome.seen]
    rows += [("repeated", f"{outcome.repeated} iterations")]
    rows += [("longest", f"{outcome.longest:.1f} s between two iterations")]
    rows += [("problem", line) for line in outcome.problems]
    rows += [("logs", outcome.logs)] if outcome.logs else []
    rows += [("verdict", f"{verdict}, {outcome.seconds:.1f} s")]
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def line(outcome: TrialOutcome) -> str:
    """Return one scenario in a line."""
    events = "; ".join(map(str, outcome.scenario.events)) or "no events"
    verdict = "pass" if outcome.has_passed else "FAIL"
    figures = (
        f"{verdict}  {outcome.seconds:5.1f} s  repeated {outcome.repeated}  longest {outcome.longest:.1f} s"
    )
    return f"seed {outcome.scenario.seed:>6}  {figures}  {events}"


def as_data(outcomes: Sequence[TrialOutcome]) -> list[dict[str, Any]]:
    """Return data for JSON."""
    return [{"passed": outcome.has_passed, **asdict(outcome)} for outcome in outcomes]
