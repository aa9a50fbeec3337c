"""The stage of a run against a switch that is already running: hardware, a model, or any other."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from pathlib import Path

import grpc

from controlplane.errors import ControlError
from controlplane.p4runtime.codec import Codec
from ptf_tests.stage.config import StandingConfig
from ptf_tests.stage.lab import SwitchStage
from ptf_tests.stage.namespace import MTU, mtu
from ptf_tests.stage.targets import STANDING, TargetError
from ptf_tests.switch import PtfSwitch, SwitchError

LONGEST = 9000  # length of the suites' longest frames, in bytes


class StandingSwitch(SwitchStage):
    """Stage of a running switch; it uses existing interfaces, and leaves the switch without entries."""

    def __init__(self, config: StandingConfig) -> None:
        self.target = config.target
        self.hardware = config.target in STANDING
        self._config = config
        try:
            self.codec = Codec.for_target(config.target, config.p4runtime, config.cpu_port)
        except ControlError as error:
            raise TargetError(str(error)) from None
        self._switch: PtfSwitch | None = None
        for place in config.ports.values():
            _usable(place.interface)

    def start(self) -> PtfSwitch:
        """Connect to the switch, load the program unless it runs, and open PTF's data plane."""
        config = self._config
        switch = PtfSwitch(config.address, config.device_id, self.codec, config.device_ports)
        self._switch = switch
        try:
            switch.connect(lambda: False)
            switch.take_over()
        except (SwitchError, ControlError, grpc.RpcError) as error:
            why = error.details() if isinstance(error, grpc.Call) else error
            raise TargetError(f"{config.target} at {config.address}: {why}") from None
        self.open_dataplane({number: place.interface for number, place in config.ports.items()})
        return switch

    def start_switches(self, ports: Mapping[int, Mapping[int, str]]) -> list[PtfSwitch]:
        """Skip tests that need several switches."""
        raise unittest.SkipTest(f"needs {len(ports)} switches, but the file has one")

    def stop_switches(self, switches: list[PtfSwitch]) -> None:
        """Do nothing: no switches were started."""

    def close(self) -> None:
        """Close the connection and the data plane; the interfaces and the switch stay."""
        self.close_dataplane()
        if self._switch is not None:
            self._switch.close()


def _usable(interface: str) -> None:
    length = mtu(interface)
    if length is None:
        raise TargetError(f"this machine has no interface {interface}")
    if length < LONGEST:
        raise TargetError(f"{interface} can't carry all frames: ip link set dev {interface} mtu {MTU}")
    ipv6 = Path("/proc/sys/net/ipv6/conf") / interface / "disable_ipv6"
    if ipv6.exists() and ipv6.read_text().strip() != "1":
        raise TargetError(
            f"the kernel sends IPv6 frames of its own from {interface}, which tests do not expect: "
            f"sysctl -w net.ipv6.conf.{interface}.disable_ipv6=1"
        )
