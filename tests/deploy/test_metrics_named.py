"""The alert rules and the dashboard name metrics that there are, and alerts fire as their tests say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.metrics import everything

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
NAMES = {sample.name for metric in everything() for sample in metric.samples}


def expressions(data: Any) -> list[str]:
    """Return all values of `expr` in nested data."""
    if isinstance(data, dict):
        own = [data["expr"]] if "expr" in data else []
        return own + [text for value in data.values() for text in expressions(value)]
    return [text for one in data for text in expressions(one)] if isinstance(data, list) else []


@pytest.mark.parametrize("file", ["prometheus/alerts.yaml", "grafana/checkmate.json"])
def test_every_metric_that_is_named_is_served(file: str) -> None:
    text = (DEPLOY / file).read_text()
    found = expressions(json.loads(text) if file.endswith("json") else yaml.safe_load(text))
    named = {name for one in found for name in re.findall(r"\bcheckmate_\w+", one)}
    assert len(named) >= 8 and named <= NAMES


def test_the_page_has_every_alert_and_every_metric() -> None:
    page = (DEPLOY.parent / "docs" / "operating.md").read_text()
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.yaml").read_text())
    assert alerts and all(f"`{alert}`" in page for alert in alerts)
    told = page[page.index("| metric |") : page.index("## Standby")]
    words = re.findall(r"`((?:checkmate|[.]{3})_[\w*]+)`", told)
    patterns = [one.replace("...", "checkmate_*") for one in words]
    names = {metric.name + "_total" * (metric.type == "counter") for metric in everything()}
    assert not {name for name in names if not any(fnmatch(name, one) for one in patterns)}
    there = names | {"checkmate_build_info"}
    assert not {one for one in patterns if not any(fnmatch(name, one) for name in there)}


def test_the_scrape_job_keeps_the_label_of_the_training_job() -> None:
    """Otherwise Prometheus has its own `job` there, and shards of different jobs count as one."""
    assert "job" in {label for metric in everything() for sample in metric.samples for label in sample.labels}
    assert yaml.safe_load((RULES / "scrape.yaml").read_text())["honor_labels"] is True


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not on PATH")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_promtool_accepts_the_rules(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
