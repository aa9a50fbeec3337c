"""Prometheus in a lab: it scrapes all processes each second, and evaluates the rules of deploy/."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from tests.gameday.alarms import Alarm
from tests.gameday.rules import faster
from topologies.crew import Crew, Member
from topologies.describe.topology import CONTROLLER
from topologies.kernel import namespaces
from topologies.lab import Lab

COMMAND: Final = "prometheus"
_DEPLOY: Final = Path(__file__).parents[2] / "deploy/prometheus"
_ADDRESS: Final = "127.0.0.1:9090"
_GAP: Final = 1.5
"""Seconds without a value after which an alert has ended; there is one each second."""
_OWN_LABELS: Final = ("__name__", "alertname", "alertstate", "severity")


def rules() -> dict[str, Any]:
    """Return the alert rules that operators get."""
    return dict(yaml.safe_load((_DEPLOY / "alerts.yaml").read_text()))


def missing() -> str:
    """Return why there is no Prometheus, or ""."""
    return "" if shutil.which(COMMAND) else f"{COMMAND} is not on PATH"


class LabPrometheus:
    """A Prometheus beside the controllers of a lab."""

    def __init__(self, lab: Lab, crew: Crew, targets: Iterable[str]) -> None:
        """Start it, and wait until it serves."""
        self._lab = lab
        folder = lab.directory / "prometheus"
        folder.mkdir()
        scrape = yaml.safe_load((_DEPLOY / "scrape.yaml").read_text())
        scrape["static_configs"] = [{"targets": list(targets)}]
        files = {
            "rules.yaml": faster(rules()),
            "prometheus.yaml": {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": ["rules.yaml"],
                "scrape_configs": [scrape],
            },
        }
        for name, content in files.items():
            folder.joinpath(name).write_text(yaml.safe_dump(content))
        argv = [
            COMMAND,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={_ADDRESS}",
            "--log.level=warn",
        ]
        self.member: Member = crew.start("prometheus", CONTROLLER, argv, environment={"GOMAXPROCS": "1"})
        crew.wait(self._ready, "Prometheus to serve", 30)

    def alarms(self, begin: float, end: float) -> list[Alarm]:
        """Return the alerts that fired between two times by the clock, in seconds after `begin`."""
        query = {"query": 'ALERTS{alertstate="firing"}', "start": begin, "end": end, "step": "1"}
        answer = json.loads(self._get("/api/v1/query_range?" + urllib.parse.urlencode(query)))
        alarms = [alarm for series in answer["data"]["result"] for alarm in spans(series, begin)]
        return sorted(alarms, key=lambda alarm: alarm.at)

    def _ready(self) -> bool:
        try:
            return bool(self._get("/-/ready"))
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with namespaces.entered(self._lab.namespace(CONTROLLER)):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://{_ADDRESS}{path}", timeout=10) as answer:
                return bytes(answer.read())


def spans(series: dict[str, Any], begin: float) -> Iterator[Alarm]:
    """Yield the alerts of a series: it may have ended and begun again."""
    metric, times = series["metric"], [at for at, _ in series["values"]]
    labels = {key: value for key, value in metric.items() if key not in _OWN_LABELS}
    starts = [at for before, at in pairwise([float("-inf"), *times]) if at - before > _GAP]
    ends = [at for at, after in pairwise([*times, float("inf")]) if after - at > _GAP]
    for start, end in zip(starts, ends, strict=True):
        yield Alarm(start - begin, end - begin, metric["alertname"], labels)
