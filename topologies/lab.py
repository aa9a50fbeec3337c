"""A lab: made, used and removed.

with Lab(load("single_tor"), target="softswitch") as lab:
    ranks = [lab.start(rank.name, ["iperf3", "-s"]) for rank in lab.topology.ranks]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from topologies import job_files, links, loss, namespaces, offloads, state, switches
from topologies.describe import (
    CONTROLLER,
    DATA_NET,
    MGMT_NET,
    BadDescription,
    Host,
    LabError,
    SwitchNode,
    Topology,
)
from topologies.job_files import Target
from topologies.signals import undisturbed

ROOT: Final = Path(__file__).resolve().parent.parent
_INTO_CGROUP: Final = 'echo $$ > "$0" && exec "$@"'

Progress = Callable[[str], None]


class Lab:
    """One lab in the kernel. `name` tells labs of one topology apart.

    `up` makes it, `down` removes it; `with` does both, and removes it after Ctrl-C or an error too.
    """

    def __init__(
        self,
        topology: Topology,
        target: Target = "softswitch",
        *,
        name: str | None = None,
        mtu: int = 1500,
        loss: float = 0.0,
        offloads: bool | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        """`loss`: the share of frames that training links lose, both ways.

        `offloads`: whether interfaces cut and sum segments themselves; by default as the target needs it.
        """
        self.topology = topology
        self.target = target
        self.name = state.check_name(name or topology.name)
        if not 1280 <= mtu <= 9000:
            raise BadDescription(f"an MTU of {mtu}; use 1500, or up to 9000")
        self.mtu = mtu
        self.loss = loss
        self.offloads = offloads if offloads is not None else target == "softswitch"
        self.loss_by: str | None = None
        self._progress = progress
        self._lock = contextlib.ExitStack()
        self._cgroup: str | None = None
        self._made = False
        self._switch_processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def switches(self) -> tuple[SwitchNode, ...]:
        """The lab's switches."""
        return self.topology.switches

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return state.folder(self.name)

    @property
    def job_file(self) -> Path:
        """Its job YAML."""
        return state.job_file(self.name)

    def namespace(self, node: str) -> str:
        """The namespace of a host, a switch or `ctl`."""
        return namespaces.name_of(self.name, node)

    def report_to(self, progress: Progress) -> None:
        """Tell `progress` of each step from now on."""
        self._progress = progress

    def up(self) -> None:
        """Make the lab and start its switches; nothing of it stays where that fails. Keeps the lab locked."""
        require_root()
        switches.check_target(self.target)
        try:
            self._lock.enter_context(state.locked(self.name))
            if state.read_record(self.name) or namespaces.of_lab(self.name):
                raise LabError(
                    f"lab {self.name} exists already; remove it with: checkmate lab down {self.name}"
                )
            self._made = True
            self._make()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove what `up` made, and end what runs in it; a signal that comes meanwhile waits."""
        with undisturbed():
            try:
                if self._made:
                    self._progress("removing the lab")
            finally:  # also where nobody listens any more: a closed terminal
                if self._made:
                    _remove(self.name)
                    for process in self._switch_processes.values():
                        process.wait()
                    self._made = False
                self.release()

    def release(self) -> None:
        """Let others change the lab, which stays as it is."""
        self._lock.close()

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    ) -> subprocess.Popen[bytes]:
        """Start a command in a node's namespace and cgroup, in a session of its own.

        Ctrl-C at the terminal doesn't reach it: whoever holds the lab decides. `down` ends it.
        """
        command = [str(part) for part in argv]
        if self._cgroup is not None:
            cgroup = Path(self._cgroup, node)
            cgroup.mkdir(exist_ok=True)
            command = ["/bin/sh", "-c", _INTO_CGROUP, f"{cgroup}/cgroup.procs", *command]
        with namespaces.entered(self.namespace(node)):
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**_environment(), **(environment or {})},
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        """A file for a process's output; it goes with the lab."""
        return self.directory / f"{name}.log"

    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        """The counters of each node's interfaces: node, interface, counter."""
        return {node: links.counters(self.namespace(node)) for node in self.topology.nodes}

    def _make(self) -> None:
        self._progress("hosts and links")
        cgroup = state.cgroup_for(self.name)
        state.write_record(state.Record(self.name, self.topology.name, self.target, cgroup))
        if cgroup is not None:
            Path(cgroup).mkdir(exist_ok=True)
        self._cgroup = cgroup
        self._write_job()
        for node in self.topology.nodes:
            namespaces.create(self.namespace(node))
            links.prepare(self.namespace(node))
        self._management()
        self._training_network()
        for switch in self.topology.switches:
            self._progress(f"switch {switch.name} ({self.target})")
            self._start_switch(switch)
        for switch in self.topology.switches:
            switches.wait_listening(
                self.name, switch, self._switch_processes[switch.name], self.log(switch.name)
            )
            if self.target == "bmv2":
                switches.deepen_queues(self.name, switch)

    def _write_job(self) -> None:
        title = f"{self.topology.name}: {self.topology.title}"
        fabric = job_files.fabric(self.topology, self.target)
        self.directory.joinpath(job_files.FABRIC_FILE).write_text(job_files.as_yaml(fabric, title))
        self.job_file.write_text(job_files.as_yaml(job_files.job(self.topology, self.name), title))

    def _management(self) -> None:
        controller = self.namespace(CONTROLLER)
        links.add_bridge(controller, MGMT_NET[1], MGMT_NET)
        members: list[SwitchNode | Host] = [*self.topology.switches, *self.topology.hosts]
        for node in members:
            links.join_bridge(controller, node.name, self.namespace(node.name), node.mgmt, MGMT_NET)

    def _training_network(self) -> None:
        for host in self.topology.hosts:
            for nic in host.interfaces:
                links.connect(self.namespace(host.name), self.namespace(nic.switch), nic, DATA_NET, self.mtu)
        for link in self.topology.links:
            (a, a_port), (b, b_port) = link.a, link.b
            links.add_cable(
                self.namespace(a), f"port{a_port}", self.namespace(b), f"port{b_port}", mtu=self.mtu
            )
        if not self.offloads:
            for namespace, interface in self._data_interfaces():
                offloads.switch_off(namespace, interface)
        if self.loss:
            for namespace, interface in self._training_ends():
                self.loss_by = loss.add(namespace, interface, self.loss)

    def _data_interfaces(self) -> list[tuple[str, str]]:
        hosts = [(self.namespace(h.name), nic.name) for h in self.topology.hosts for nic in h.interfaces]
        ports = [
            (self.namespace(s.name), f"port{port}")
            for s in self.topology.switches
            for port in range(1, s.ports + 1)
        ]
        return hosts + ports

    def _training_ends(self) -> list[tuple[str, str]]:
        """Both ends of each rank's link. Shadow links lose nothing, as PFC promises."""
        nics = [(host, nic) for host in self.topology.ranks for nic in host.interfaces]
        return [
            *((self.namespace(host.name), nic.name) for host, nic in nics),
            *((self.namespace(nic.switch), f"port{nic.port}") for _, nic in nics),
        ]

    def _start_switch(self, switch: SwitchNode) -> None:
        own_socket = self.target == "bmv2" and switches.has_notifications()
        notifications = self.directory / f"{switch.name}.ipc" if own_socket else None
        command = switches.command(switch, self.target, notifications)
        with self.log(switch.name).open("wb") as log:
            self._switch_processes[switch.name] = self.start(
                switch.name, command, stdout=log, stderr=subprocess.STDOUT
            )


def _environment() -> dict[str, str]:
    """Ours, so that this very package is imported, and without proxies: nothing leads out of a lab."""
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept


def require_root() -> None:
    """`LabError` where namespaces can't be made, or cgroups can't be seen."""
    if os.geteuid() != 0:
        raise LabError("labs need root, for network namespaces; run it with sudo")
    if (inside := namespaces.own_name()) is not None:
        raise LabError(f"this shell is in the namespace {inside}; leave it first, with exit")


def down(name: str) -> bool:
    """Remove a lab, whoever made it and however that ended; whether there was anything of it."""
    require_root()
    state.check_name(name)
    if name not in state.existing() and not namespaces.of_lab(name):
        return False
    with state.locked(name), undisturbed():
        _remove(name)
    return True


def _remove(name: str) -> None:
    """Processes first, hosts before switches; then what they lived in; the folder last."""
    record = state.read_record(name)
    present = namespaces.of_lab(name)
    namespaces.end_processes(present)
    for namespace in present:
        namespaces.remove(namespace)
    if record is not None:
        state.remove_cgroup(record.cgroup)
    state.forget(name)
