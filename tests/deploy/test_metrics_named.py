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
        expression = [data["expr"]] if "expr" in data else []
        return expression + [text for value in data.values() for text in expressions(value)]
    return [text for element in data for text in expressions(element)] if isinstance(data, list) else []


@pytest.mark.parametrize("file", ["prometheus/alerts.yaml", "grafana/checkmate.json"])
def test_every_metric_that_is_named_is_served(file: str) -> None:
    text = (DEPLOY / file).read_text()
    texts = expressions(json.loads(text) if file.endswith("json") else yaml.safe_load(text))
    names = {name for expression in texts for name in re.findall(r"\bcheckmate_\w+", expression)}
    assert len(names) >= 8 and names <= NAMES


def test_the_page_has_every_alert_and_every_metric() -> None:
    page = (DEPLOY.parent / "docs" / "operating.md").read_text()
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.yaml").read_text())
    assert alerts and all(f"`{alert}`" in page for alert in alerts)
    table = page[page.index("| metric |") : page.index("## Standby")]
    words = re.findall(r"`((?:checkmate|[.]{3})_[\w*]+)`", table)
    patterns = [pattern.replace("...", "checkmate_*") for pattern in words]
    names = {metric.name + "_total" * (metric.type == "counter") for metric in everything()}
    assert not {name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)}
    there = names | {"checkmate_build_info"}
    assert not {pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in there)}


def test_the_scrape_job_keeps_the_label_of_the_training_job() -> None:
    """Otherwise Prometheus has its own `job` there, and shards of different jobs count as one."""
    assert "job" in {label for metric in everything() for sample in metric.samples for label in sample.labels}
    assert yaml.safe_load((RULES / "scrape.yaml").read_text())["honor_labels"] is True


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not on PATH")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_promtool_accepts_the_rules(words: tuple[str, ...]) -> None:
    result = subprocess.run(["promtool", *words], cwd=RULES, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
