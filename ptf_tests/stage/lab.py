"""The stage of a run: namespace, interfaces, PTF's data plane, and the switches."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping

import grpc
import ptf
import ptf.dataplane
import ptf.ptfutils

from controlplane.p4runtime.codec import Codec
from ptf_tests import fabric
from ptf_tests.packets import PORTS
from ptf_tests.stage import namespace, tna
from ptf_tests.stage.targets import SwitchProcess, TargetError
from ptf_tests.switch import PtfSwitch, SwitchError

_PTF_CONFIG = {
    "platform": "linux",
    "log_dir": None,
    "log_file": os.devnull,
    "relax": False,
    "socket_recv_size": 16384,
    "qlen": 1 << 20,
}


class SwitchStage(ABC):
    """The environment of tests: the switch under test, and PTF's data plane (PTF's device 0)."""

    target: str
    hardware: bool = False
    """A chip or its model: Ethernet pads short frames, and byte counts differ."""

    @abstractmethod
    def start(self) -> PtfSwitch:
        """Return the switch under test, with the program loaded."""

    @abstractmethod
    def start_switches(self, ports: Mapping[int, Mapping[int, str]]) -> list[PtfSwitch]:
        """Start further switches by number, each with its ports' interfaces."""

    @abstractmethod
    def stop_switches(self, switches: list[PtfSwitch]) -> None:
        """Stop some of the switches."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything that was started."""

    def open_dataplane(self, interfaces: Mapping[int, str]) -> None:
        """Open PTF's data plane over the interfaces of the ports."""
        ptf.config.update(_PTF_CONFIG)
        ptf.ptfutils.default_timeout = 5.0
        ptf.ptfutils.default_negative_timeout = 0.01
        ptf.dataplane_instance = ptf.dataplane.DataPlane(ptf.config)
        for port, interface in interfaces.items():
            ptf.dataplane_instance.port_add(interface, 0, port)

    def close_dataplane(self) -> None:
        """Close PTF's data plane if it is open."""
        if ptf.dataplane_instance is not None:
            ptf.dataplane_instance.kill()
            ptf.dataplane_instance = None


class NamespaceStage(SwitchStage):
    """A stage in a new network namespace, which the process never leaves; one per process."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.codec = tna.codec() if target == "tna" else Codec.for_target(target)
        self._running: list[tuple[SwitchProcess, PtfSwitch]] = []
        namespace.enter()
        namespace.add_links((f"t{port}", f"s{port}") for port in PORTS)
        namespace.add_links(fabric.interface_pairs())

    def start(self) -> PtfSwitch:
        """Start the switch under test, and PTF's data plane."""
        (switch,) = self.start_switches({0: {port: f"s{port}" for port in PORTS}})
        self.open_dataplane({port: f"t{port}" for port in PORTS})
        for device, port, interface in fabric.host_interfaces():
            ptf.dataplane_instance.port_add(interface, device, port)
        return switch

    def start_switches(self, ports: Mapping[int, Mapping[int, str]]) -> list[PtfSwitch]:
        """Start switches by number, each with its ports' interfaces and the program loaded."""
        pairs = []
        for number, interfaces in ports.items():
            process = SwitchProcess(self.target, number, interfaces)
            switch = PtfSwitch(process.address, process.device_id, self.codec)
            self._running.append((process, switch))
            pairs.append((process, switch))
        for process, switch in pairs:
            try:
                switch.connect(lambda process=process: process.has_ended)  # type: ignore[misc]
                switch.set_pipeline()
            except (SwitchError, grpc.RpcError) as error:
                output = process.output() or "(nothing)"
                why = error.details() if isinstance(error, grpc.Call) else error
                raise TargetError(f"{self.target} doesn't start: {why}. It printed:\n{output}") from None
        return [switch for _, switch in pairs]

    def stop_switches(self, switches: list[PtfSwitch]) -> None:
        """Stop some of the switches."""
        for process, switch in [pair for pair in self._running if pair[1] in switches]:
            switch.close()
            process.stop()
            self._running.remove((process, switch))

    def close(self) -> None:
        """End everything that was started; the namespace goes with this process."""
        self.close_dataplane()
        self.stop_switches([switch for _, switch in self._running])
