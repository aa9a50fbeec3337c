"""A lab: created, used and removed.

with Lab(load("single_tor"), target="softswitch") as lab:
    ranks = [lab.start(rank.name, ["iperf3", "-s"]) for rank in lab.topology.ranks]
"""

from __future__ import annotations

import contextlib
import datetime as dt
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from checkmate.events.event_log import FOLDER as EVENTS_FOLDER
from checkmate.job.files import read_job
from checkmate.keys.access import INSECURE, keys_folder
from checkmate.keys.making import make_keys
from topologies import state, switches, torchrun
from topologies.describe import job_files
from topologies.describe.job_files import Target
from topologies.describe.topology import CABLES, BadDescription, LabError, SwitchNode, Topology
from topologies.kernel import cgroups, links, namespaces, processes
from topologies.kernel.processes import PYTHON
from topologies.signals import undisturbed

_INTO_CGROUP: Final = 'echo $$ > "$0" && exec "$@"'

Progress = Callable[[str], None]


class Lab:
    """One lab in the kernel. Labs of one topology differ in `name`.

    `up` creates it, `down` removes it; `with` does both, and also removes it after Ctrl-C or an error.
    """

    def __init__(
        self,
        topology: Topology,
        target: Target = "softswitch",
        *,
        name: str | None = None,
        mtu: int = 1500,
        loss: float = 0.0,
        copy_loss: float = 0.0,
        jitter: float = 0.0,
        offloads: bool | None = None,
        switch_cpus: Collection[int] | None = None,
        switch_metrics: bool = False,
        progress: Progress = lambda _: None,
    ) -> None:
        """Describe a lab; `up` creates it.

        Args:
            topology: Hosts, switches and links.
            target: The switches' target; without switches, the default.
            name: The lab's name; by default the topology's.
            mtu: MTU of the training network, in bytes.
            loss: Share of frames that training links lose in each direction.
            copy_loss: Share of frames that are lost between switches and shadow nodes.
            jitter: Longest delay of training links in each direction, in seconds; frames stay in order.
            offloads: Whether interfaces segment and compute checksums; by default as the target needs.
            switch_cpus: CPUs of the switches, on which they go first; by default all.
            switch_metrics: Whether switches of the embedded target serve metrics (`switches.METRICS_PORT`).
            progress: Called with each step.
        """
        self.topology = topology
        self.target = target
        self.name = state.check_name(name or topology.name)
        if not 1280 <= mtu <= 9000:
            raise BadDescription(f"invalid MTU {mtu}; use 1500, or up to 9000")
        self.mtu = mtu
        self.loss, self.copy_loss = loss, copy_loss
        if not 0 <= jitter <= 1:
            raise BadDescription(f"invalid jitter {jitter:g} s; use seconds from 0 to 1, such as 0.005")
        self.jitter = jitter
        self.offloads = offloads if offloads is not None else target == "softswitch"
        self.switch_cpus = switch_cpus
        self.switch_metrics = switch_metrics
        if not topology.switches and (target != "softswitch" or mtu != 1500 or loss or copy_loss or jitter):
            raise BadDescription(
                f"lab {self.name} has neither switches nor training links, because hosts copy gradients "
                "(copies: host): leave --target, --mtu, --loss, --copy-loss and --jitter out"
            )
        self.loss_by: str | None = None
        self._progress = progress
        self._lock = contextlib.ExitStack()
        self._cgroup: str | None = None
        self._is_up = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def attached(cls, name: str) -> Lab:
        """Return a lab that is up, to start processes in it; raise `BadDescription` if there is none."""
        record = state.read_record(state.check_name(name))
        if record is None:
            raise BadDescription(state.missing([name]))
        lab = cls(state.read_topology(record), record.target or "softswitch", name=name)
        lab._cgroup = record.cgroup
        return lab

    @property
    def switches(self) -> tuple[SwitchNode, ...]:
        """The lab's switches."""
        return self.topology.switches

    @property
    def switch_pids(self) -> dict[str, int]:
        """Process numbers of the running switches, by name."""
        running = {switch.name: self._processes.get(switch.name) for switch in self.switches}
        return {name: process.pid for name, process in running.items() if process}

    @property
    def directory(self) -> Path:
        """The folder of its files."""
        return state.folder(self.name)

    @property
    def job_file(self) -> Path:
        """Its job file."""
        return state.job_file(self.name)

    def job_file_of(self, job: Topology) -> Path:
        """Return the path of the job file of the lab's job, or of one beside it."""
        beside = job in self.topology.beside
        return self.directory / job_files.file_beside(job) if beside else self.job_file

    def namespace(self, node: str) -> str:
        """Return the namespace of a host, a switch or the controller (`ctl`)."""
        return namespaces.name_of(self.name, node)

    def report_to(self, progress: Progress) -> None:
        """Call `progress` with each step from now on."""
        self._progress = progress

    def up(self) -> None:
        """Create the lab and start its switches; remove all of it on failure. The lab stays locked."""
        state.require_root()
        switches.check_target(self.target, self.switches)
        try:
            self._lock.enter_context(state.locked(self.name))
            if state.read_record(self.name) or namespaces.of_lab(self.name):
                raise LabError(
                    f"lab {self.name} already exists; remove it with: checkmate lab down {self.name}"
                )
            self._is_up = True
            self._make()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End the lab's processes and remove it; signals are held back meanwhile."""
        with undisturbed():
            try:
                if self._is_up:
                    self._progress("removing the lab")
            finally:  # even if the report fails, as on a closed terminal
                if self._is_up:
                    state.remove(self.name)
                    for process in self._processes.values():
                        process.wait()
                    self._processes.clear()
                    self._is_up = False
                self.release()

    def release(self) -> None:
        """Unlock the lab, which stays as it is."""
        self._lock.close()

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def start(
        self,
        node: str,
        argv: Sequence[str | Path],
        *,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        cpus: Collection[int] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a node's namespace and cgroup, in a session of its own.

        Its environment is `environment`'s, with the changes in `environment`. It may use only `cpus` if they
        are specified. Ctrl-C at the terminal does not reach it; `down` ends it.

        Raises:
            BadDescription: This machine does not have such CPUs.
        """
        command = [str(part) for part in argv]
        if (cgroup := self.cgroup(node)) is not None:
            command = ["/bin/sh", "-c", _INTO_CGROUP, f"{cgroup}/cgroup.procs", *command]
        with namespaces.entered(self.namespace(node)), processes.pinned(cpus):
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**self.environment(node), **(environment or {})},
                start_new_session=True,
            )

    def environment(self, node: str) -> dict[str, str]:
        """Return the environment of a node's processes: ours, and what job, torchrun and NCCL need there."""
        events = {EVENTS_FOLDER: str(self.directory / "events")}  # or the folder that the user has named
        variables = {**torchrun.DEFAULTS, **events, **processes.environment(), **torchrun.ENVIRONMENT}
        variables.pop(INSECURE, None)  # a lab has keys
        variables |= torchrun.nccl_environment(f"{self.name} {node}")
        return variables | {"CHECKMATE_JOB": str(self.job_file_at(node))}

    def job_file_at(self, node: str) -> Path:
        """Return the path of the job file of a host's job; for other nodes, of the lab's."""
        beside = [job for job in self.topology.beside if node in {host.name for host in job.hosts}]
        return self.job_file_of(*beside or [self.topology])

    def cgroup(self, node: str) -> Path | None:
        """Return the cgroup of a node's processes, which exists; `None` without cgroup v2."""
        if self._cgroup is None:
            return None
        folder = Path(self._cgroup, node)
        folder.mkdir(exist_ok=True)
        return folder

    def stop_switch(self, name: str) -> None:
        """Kill a switch's process with SIGKILL: its entries are lost, its ports stay."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def dead_switches(self) -> list[str]:
        """Return the names of switches that do not run."""
        return [
            switch.name for switch in self.switches if not namespaces.processes([self.namespace(switch.name)])
        ]

    def restart_switch(self, name: str) -> None:
        """Kill a switch if it runs, start it without entries, and wait until it listens."""
        self.stop_switch(name)
        (switch,) = (switch for switch in self.switches if switch.name == name)
        self._start_switch(switch)
        self._await_switch(switch)

    def log(self, name: str) -> Path:
        """Return the path of a process's log, which is removed with the lab."""
        return self.directory / f"{name}.log"

    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counters of each node's interfaces, by node, interface and counter."""
        return {node: links.counters(self.namespace(node)) for node in self.topology.nodes}

    def _make(self) -> None:
        self._progress("hosts and links")
        cgroup = cgroups.place(self.name)
        target = self.target if self.topology.switches else None
        state.write_record(state.LabRecord(self.name, self.topology.name, target, cgroup))
        if cgroup is not None:
            Path(cgroup).mkdir(exist_ok=True)
        self._cgroup = cgroup
        self._write_job()
        has_cables = bool(self.jitter)
        for node in (*self.topology.nodes, *([CABLES] if has_cables else [])):
            namespaces.create(self.namespace(node))
            links.prepare(self.namespace(node))
        links.connect_management(self.name, self.topology)
        links.connect_training(
            self.name, self.topology, self.mtu, has_cables=has_cables, offload=self.offloads
        )
        if self.loss:
            self.loss_by = links.lose(self.name, self.topology, self.loss)
        if self.copy_loss:
            links.lose_copies(self.name, self.topology, self.copy_loss)
        if has_cables:
            self._join_cables()
        for switch in self.topology.switches:
            self._progress(f"switch {switch.name} ({self.target})")
            self._start_switch(switch)
        for switch in self.topology.switches:
            self._await_switch(switch)

    def _write_job(self) -> None:
        for name, text in job_files.files(self.topology, self.name, self.target).items():
            self.directory.joinpath(name).write_text(text)
        jobs = [read_job(self.job_file_of(job)) for job in self.topology.jobs]
        make_keys([(job, keys_folder(job)) for job in jobs], dt.datetime.now(dt.UTC))

    def _join_cables(self) -> None:
        """Start the process that forwards frames with a delay where the ranks' cables are cut."""
        pairs = [":".join(ends) for host in self.topology.trainers for ends in links.cut_ends(host)]
        argv = [*PYTHON, "-m", "topologies.kernel.jitter", "--seconds", f"{self.jitter:g}", *pairs]
        with self.log(CABLES).open("wb") as log:
            process = self.start(CABLES, argv, stdout=subprocess.PIPE, stderr=log, cpus=self.switch_cpus)
        assert process.stdout is not None
        with process.stdout as output:
            if output.readline() != b"ready\n":
                raise LabError(f"cables: {self.log(CABLES).read_text().strip()}")
        self._processes[CABLES] = process

    def _start_switch(self, switch: SwitchNode) -> None:
        own_socket = self.target == "bmv2" and switches.has_notifications()
        notifications = self.directory / f"{switch.name}.ipc" if own_socket else None
        statistics = switches.statistics_file(self.directory, switch)
        command = switches.command(
            switch,
            self.target,
            self.directory,
            notifications=notifications,
            statistics=statistics,
            metrics=self.switch_metrics,
        )
        # A real switch does not wait for the hosts' processes, so neither does one that shares their CPUs.
        first = contextlib.nullcontext() if self.switch_cpus is None else processes.ahead()
        with self.log(switch.name).open("ab") as log, first:
            self._processes[switch.name] = self.start(
                switch.name, command, stdout=log, stderr=subprocess.STDOUT, cpus=self.switch_cpus
            )

    def _await_switch(self, switch: SwitchNode) -> None:
        process = self._processes[switch.name]
        switches.wait_listening(self.name, switch, self.target, process, self.log(switch.name))
        if self.target == "bmv2":
            switches.deepen_queues(self.name, switch)


def down(name: str) -> bool:
    """Remove a lab, even one that another process left behind; return whether there was one."""
    state.require_root()
    state.check_name(name)
    if name not in state.existing() and not namespaces.of_lab(name):
        return False
    with state.locked(name), undisturbed():
        state.remove(name)
    return True
