"""The cost of metrics: a job whose processes are scraped in some blocks of iterations, not in others."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks.figures import Figure, Result, Skipped, ratios, spread95
from benchmarks.training.blocks import WARM_UP, block
from benchmarks.training.twin_labs import absolute
from topologies.crew import Crew, serving
from topologies.describe.topology import CONTROLLER, Topology, load
from topologies.kernel.namespaces import entered
from topologies.lab import Lab
from topologies.switches import METRICS_PORT
from topologies.training.job import JobPlan, TrainingJob, start_all
from topologies.training.record import TimedBlock

TITLE: Final = (
    "Metrics: a controller, 2 shadow nodes and a switch that share a core, scraped every second or not at all"
)
ROUNDS: Final = 20
ITERATIONS: Final = 20
"""In each block, some seconds."""
SCRAPE_SECONDS: Final = 1.0
"""Seconds between two scrapes of a process; Prometheus' default is 60, and 15 in its example."""
MODES: Final = ("quiet", "scraped", "quiet again")
_CONTROLLER: Final = "127.0.0.1:9460"
_NODE_PORT: Final = 9461


class Scraper:
    """Scrapes all processes from the controller's namespace, in a thread, while it is `on`."""

    def __init__(self, lab: Lab) -> None:
        self.on = threading.Event()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """How long scrapes took, by process."""
        self._lab = lab
        self._targets = _targets(lab.topology)
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread until the block ends. Raise what it raises."""
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(self._run)
            try:
                yield
            finally:
                self._stop.set()
                self.on.set()
            running.result()

    def _run(self) -> None:
        if self._lab.switch_cpus:
            os.sched_setaffinity(0, self._lab.switch_cpus)  # of this thread
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with entered(self._lab.namespace(CONTROLLER)):
            while self.on.wait() and not self._stop.is_set():
                for name, address in self._targets.items():
                    began = time.monotonic()
                    with opener.open(f"http://{address}/metrics", timeout=10) as answer:
                        answer.read()
                    self.seconds[name].append(time.monotonic() - began)
                self._stop.wait(SCRAPE_SECONDS)


def measure() -> list[Result]:
    """Return every figure of this module."""
    if os.geteuid() != 0:
        return [Skipped("metrics", "needs root, for network namespaces")]
    blocks: dict[str, list[TimedBlock]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder, Progress(transient=True) as bar:
        task = bar.add_task("metrics", total=ROUNDS * len(MODES))
        with _job(Path(folder)) as job:
            scraper = Scraper(job.crew.lab)
            with scraper.running():
                block(job, WARM_UP)
                for number in range(ROUNDS):
                    first = number % len(MODES)
                    for mode in (*MODES[first:], *MODES[:first]):
                        scraper.on.set() if mode == "scraped" else scraper.on.clear()
                        blocks[mode].append(block(job, ITERATIONS))
                        bar.advance(task)
    return _figures(blocks, scraper.seconds)


@contextlib.contextmanager
def _job(folder: Path) -> Iterator[TrainingJob]:
    """Yield a job whose processes all serve metrics; trainers share a core, all else shares another."""
    usable = sorted(os.sched_getaffinity(0))
    trainers, other_cpus = ({usable[0]}, {usable[1]}) if len(usable) > 1 else (None, None)
    plan = JobPlan(("--iterations", "1000000", "--batch", "8"), gated=True)
    lab = Lab(load("single_tor"), name="bench_metrics", switch_cpus=other_cpus, switch_metrics=True)
    controller = ("--no-view", "--metrics", _CONTROLLER)
    with lab, Crew(lab) as crew, serving(crew, *controller, lab.job_file, cpus=other_cpus):
        job = _ScrapedJob(crew, plan, folder, cpus=trainers, shadow_cpus=other_cpus)
        job.start_shadow_nodes()
        start_all([job])
        yield job
        job.stop()


class _ScrapedJob(TrainingJob):
    """A job whose shadow nodes serve metrics, at the port that `_targets` expects."""

    def options_of(self, node: int) -> tuple[str, ...]:
        host = self.crew.lab.topology.host(f"shadow{node}")
        return (*super().options_of(node), "--metrics", f"{host.mgmt}:{_NODE_PORT}")


def _targets(topology: Topology) -> dict[str, str]:
    return {
        "controller": _CONTROLLER,
        **{host.name: f"{host.mgmt}:{_NODE_PORT}" for host in topology.shadow_nodes},
        **{switch.name: f"{switch.mgmt}:{METRICS_PORT}" for switch in topology.switches},
    }


def _figures(blocks: Mapping[str, list[TimedBlock]], scrapes: Mapping[str, list[float]]) -> list[Result]:
    quiet, scraped, again = ([sample.seconds for sample in blocks[mode]] for mode in MODES)
    cost, control = ratios(scraped, quiet), ratios(again, quiet)
    return [
        Figure("scraped every second / not scraped", cost, "", smaller=True, note=spread95(cost)),
        Figure("control: not scraped, again / not scraped", control, "", note=spread95(control)),
        *(
            Figure(f"one scrape: {name}", tuple(1000 * sample for sample in seconds), "ms", smaller=True)
            for name, seconds in scrapes.items()
        ),
        *absolute(blocks),
    ]
