"""Start of a lab's switches: command lines, readiness, and BMv2's queues."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from checkmate.base import extras
from checkmate.job.fields import CPU_PORT
from topologies import tofino_model
from topologies.describe.job_files import Target
from topologies.describe.topology import CONTROLLER, P4RUNTIME_PORT, LabError, SwitchNode
from topologies.kernel.namespaces import entered, name_of
from topologies.kernel.processes import PYTHON, last_lines

BMV2: Final = "simple_switch_grpc"
QUEUE_DEPTH: Final = 16384
"""Packets in each of BMv2's egress queues. Its default of 64 overflows silently after replication."""
THRIFT_PORT: Final = 9090
METRICS_PORT: Final = 9462
_START_SECONDS: Final = {"softswitch": 30.0, "bmv2": 30.0, "tofino": 180.0}
_THRIFT_SECONDS: Final = 30.0
_IDL = Path(__file__).with_name("simple_switch.thrift")


def command(
    switch: SwitchNode,
    target: Target,
    folder: Path,
    *,
    notifications: Path | None = None,
    statistics: Path | None = None,
    metrics: bool = False,
) -> list[str]:
    """Return the command line that starts a switch in its namespace. Pure.

    Args:
        switch: The switch.
        target: Its target.
        folder: The lab's folder.
        notifications: Path of the socket of a BMv2 built with nanomsg; by default it would be in /tmp.
        statistics: The file for the port counters of the embedded target; BMv2 has none.
        metrics: Whether the embedded target serves metrics, at `METRICS_PORT` of its address.
    """
    if target == "tofino":
        return tofino_model.command(switch, folder / switch.name)
    ports = [part for port in range(1, switch.ports + 1) for part in ("-i", f"{port}@port{port}")]
    general = ["--no-p4", "--device-id", str(switch.device_id), *ports]
    target_options = ["--grpc-server-addr", switch.address, "--cpu-port", str(CPU_PORT)]
    if target == "bmv2":
        if notifications is not None:
            general += ["--notifications-addr", f"ipc://{notifications}"]
        return [BMV2, *general, "--", *target_options]
    stats = [] if statistics is None else ["--stats-file", str(statistics)]
    # The management network ends at the namespaces of the lab, so nobody else reaches the switch.
    metrics_options = ["--metrics", f"{switch.mgmt}:{METRICS_PORT}"] if metrics else []
    return [*PYTHON, "-m", "softswitch", *general, *target_options, "--insecure", *stats, *metrics_options]


def statistics_file(folder: Path, switch: SwitchNode) -> Path:
    """Return the path of a switch's statistics in a lab's folder."""
    return folder / f"{switch.name}.stats.json"


def check_target(target: Target, switches: Sequence[SwitchNode]) -> None:
    """Raise `LabError` if the target is not installed, and `ExtraMissing` for a lab's own libraries."""
    extras.check("a lab", "demo")
    if target == "tofino":
        tofino_model.check_ports(switches)
        tofino_model.check_installed()
    if target == "bmv2" and shutil.which(BMV2) is None:
        raise LabError(
            f"--target bmv2 needs {BMV2} on PATH (see github.com/p4lang/behavioral-model); "
            "--target softswitch needs nothing"
        )


def has_notifications() -> bool:
    """Return whether BMv2 was built with nanomsg."""
    result = subprocess.run([BMV2, "--help"], capture_output=True, text=True, check=False)
    return "--notifications-addr" in result.stdout + result.stderr


def wait_listening(
    lab: str, switch: SwitchNode, target: Target, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until the switch's P4Runtime server accepts connections; raise `LabError` if the switch ends."""
    seconds = _START_SECONDS[target]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LabError(f"switch {switch.name} ended with status {process.returncode}: {_end_of(log)}")
        with entered(name_of(lab, CONTROLLER)), socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((str(switch.mgmt), P4RUNTIME_PORT)) == 0:
                return
        time.sleep(0.05)
    raise LabError(f"switch {switch.name} doesn't listen after {seconds:g} s: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return last_lines(log.read_text(errors="replace"))


def deepen_queues(lab: str, switch: SwitchNode, depth: int = QUEUE_DEPTH) -> None:
    """Set the depth of all of BMv2's egress queues, over Thrift from within its namespace."""
    from thriftpy2.thrift import TException  # noqa: PLC0415 -- BMv2's labs alone need it

    deadline = time.monotonic() + _THRIFT_SECONDS
    while True:
        try:
            status = _set_queue_depths(name_of(lab, switch.name), depth)
            break
        except (TException, OSError) as error:
            # Its server accepts calls before it has registered its services.
            if time.monotonic() > deadline:
                raise LabError(
                    f"switch {switch.name}: its queues can't be set over Thrift ({error}): "
                    f"{BMV2} must be built with it"
                ) from None
            time.sleep(0.05)
    if status:
        raise LabError(f"switch {switch.name} refused queues of {depth} packets (status {status})")


def _set_queue_depths(namespace: str, depth: int) -> int:
    """Make the Thrift call; return BMv2's status, which is 0 on success."""
    import thriftpy2  # noqa: PLC0415
    from thriftpy2.protocol import TBinaryProtocolFactory, TMultiplexedProtocolFactory  # noqa: PLC0415
    from thriftpy2.rpc import client_context  # noqa: PLC0415

    service = thriftpy2.load(str(_IDL), module_name="simple_switch_thrift").SimpleSwitch
    protocol = TMultiplexedProtocolFactory(
        TBinaryProtocolFactory(),  # type: ignore[no-untyped-call]
        "simple_switch",
    )
    with (
        entered(namespace),
        client_context(service, "127.0.0.1", THRIFT_PORT, proto_factory=protocol) as client,
    ):
        return int(client.set_all_egress_queue_depths(depth))
