"""The stage of a run: namespace, interfaces, PTF's data plane, and the switch under test."""

from __future__ import annotations

import os
from collections.abc import Mapping

import grpc
import ptf
import ptf.dataplane
import ptf.ptfutils

from controlplane.codec import Codec
from ptf_tests import fabric, namespace
from ptf_tests.packets import PORTS
from ptf_tests.switch import Switch, SwitchError
from ptf_tests.targets import Process, TargetError

_PTF_CONFIG = {
    "platform": "linux",
    "log_dir": None,
    "log_file": os.devnull,
    "relax": False,
    "socket_recv_size": 16384,
    "qlen": 1 << 20,
}


class Lab:
    """Enters a new network namespace for good; one for each process."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.codec = Codec.for_target(target)
        self._running: list[tuple[Process, Switch]] = []
        namespace.enter()
        namespace.add_links((f"t{port}", f"s{port}") for port in PORTS)
        namespace.add_links(fabric.interface_pairs())

    def start(self) -> Switch:
        """Start the switch under test, and PTF's data plane (PTF's device 0)."""
        (switch,) = self.start_switches({0: {port: f"s{port}" for port in PORTS}})
        ptf.config.update(_PTF_CONFIG)
        ptf.ptfutils.default_timeout = 5.0
        ptf.ptfutils.default_negative_timeout = 0.01
        ptf.dataplane_instance = ptf.dataplane.DataPlane(ptf.config)
        for port in PORTS:
            ptf.dataplane_instance.port_add(f"t{port}", 0, port)
        for device, port, interface in fabric.host_interfaces():
            ptf.dataplane_instance.port_add(interface, device, port)
        return switch

    def start_switches(self, ports: Mapping[int, Mapping[int, str]]) -> list[Switch]:
        """Start switches by number, each with its ports' interfaces; all have the program loaded."""
        started = []
        for number, interfaces in ports.items():
            process = Process(self.target, number, interfaces)
            switch = Switch(process.address, process.device_id, self.codec)
            self._running.append((process, switch))
            started.append((process, switch))
        for process, switch in started:
            try:
                switch.connect(lambda process=process: process.ended)  # type: ignore[misc]
                switch.set_pipeline()
            except (SwitchError, grpc.RpcError) as error:
                said = process.output() or "(nothing)"
                why = error.details() if isinstance(error, grpc.Call) else error
                raise TargetError(f"{self.target} doesn't start: {why}. It printed:\n{said}") from None
        return [switch for _, switch in started]

    def stop_switches(self, switches: list[Switch]) -> None:
        """End some switches before the rest."""
        for process, switch in [pair for pair in self._running if pair[1] in switches]:
            switch.close()
            process.stop()
            self._running.remove((process, switch))

    def close(self) -> None:
        """End everything that was started; the namespace goes with this process."""
        if ptf.dataplane_instance is not None:
            ptf.dataplane_instance.kill()
            ptf.dataplane_instance = None
        self.stop_switches([switch for _, switch in self._running])
