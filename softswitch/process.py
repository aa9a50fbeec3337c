"""The switch as a process."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finsy.proto import p4i, p4r
from google.protobuf import text_format

from checkmate.base.extras import ExtraMissing, needs
from checkmate.base.privileges import Capability, PrivilegesError, keep_only, to_listen
from softswitch.frames.afpacket import PacketPort
from softswitch.loglines import LineLimit
from softswitch.options import Options, UsageError, p4info_path, parse
from softswitch.p4runtime.pipeline import Pipeline, build
from softswitch.p4runtime.server import P4RuntimeServer
from softswitch.p4runtime.service import P4RuntimeService
from softswitch.switch import SoftSwitch

if TYPE_CHECKING:
    from checkmate.base.metrics import MetricsServer

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Longest time, in seconds, for which a control-plane thread may hold the interpreter."""
STATS_INTERVAL_S = 1.0
_COUNTING = threading.Lock()
"""Reading the kernel's counters clears them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a switch until SIGINT or SIGTERM; return the exit status."""
    try:
        run(parse(sys.argv[1:] if arguments is None else arguments))
    except UsageError as error:
        print(f"softswitch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # Before the signal handlers are in place; everything open was closed.
        return 0
    return 0


def run(options: Options) -> None:
    """Forward packets until a signal arrives; raise `UsageError` for invalid options."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LineLimit())
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[handler],
    )
    if options.thrift_port is not None:
        print("softswitch: --thrift-port is ignored: there is no Thrift server", file=sys.stderr)
    if options.exposed:
        print(
            f"softswitch: --insecure: whoever reaches {options.address} controls this switch", file=sys.stderr
        )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    credentials = options.tls.read() if options.tls else None
    pipeline = load_pipeline(options.config) if options.config else None
    with ExitStack() as stack:
        ports = open_ports(options.interfaces, stack)
        drop_privileges(options)
        switch = SoftSwitch(ports, options.cpu_port, partial(print, flush=True) if options.trace else None)
        service = P4RuntimeService(switch, options.device_id)
        if pipeline is not None:
            service.commit(pipeline)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: switch.stop())
        if options.metrics:
            stack.enter_context(metrics(options, switch, service))
        try:  # last, so that all the rest answers once P4Runtime does
            server = P4RuntimeServer(service, options.address, credentials() if credentials else None)
        except OSError as error:
            raise UsageError(str(error)) from None
        stack.callback(server.stop)
        if options.stats_file:
            stack.enter_context(stats_file(options.stats_file, switch, service))
        address = f"{options.address.rpartition(':')[0]}:{server.port}"
        names = ", ".join(f"{number}@{name}" for number, name in options.interfaces.items()) or "none"
        print(f"softswitch: P4Runtime on {address}, device {options.device_id}, ports: {names}", flush=True)
        switch.run()


def open_ports(interfaces: dict[int, str], stack: ExitStack) -> list[PacketPort]:
    """Open a port for each interface; raise `UsageError` with the first that fails."""
    ports = []
    for number, name in interfaces.items():
        try:
            port = PacketPort(number, name)
        except PermissionError:
            raise UsageError(
                f"interface {name}: opening it requires root (CAP_NET_RAW, CAP_NET_ADMIN)"
            ) from None
        except OSError as error:
            raise UsageError(f"interface {name}: {error.strerror or error}") from None
        stack.callback(port.close)
        ports.append(port)
    return ports


def drop_privileges(options: Options) -> None:
    """Keep what opens an interface that was replaced, and a privileged TCP port.

    Raises:
        UsageError: The kernel refuses, or other threads would keep their privileges.
    """
    capabilities = {Capability.NET_RAW, Capability.NET_ADMIN} if options.interfaces else set()
    addresses = [options.address, *([options.metrics] if options.metrics else [])]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    try:
        keep_only(*capabilities, *to_listen(filter(None, ports)))  # 0 is any port
    except PrivilegesError as error:
        raise UsageError(f"privileges could not be dropped: {error}") from None


def load_pipeline(config: Path) -> Pipeline:
    """Return the pipeline of a BMv2 JSON file and the P4Info beside it; raise `UsageError` on failure."""
    try:
        device_config = config.read_bytes()
        p4info = text_format.Parse(p4info_path(config).read_text(), p4i.P4Info())
        return build(p4r.ForwardingPipelineConfig(p4info=p4info, p4_device_config=device_config))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    except text_format.ParseError as error:
        raise UsageError(f"{p4info_path(config)}: not a P4Info in text form: {error}") from None
    except ValueError as error:
        raise UsageError(f"{config}: {error}") from None


@contextmanager
def stats_file(path: Path, switch: SoftSwitch, service: P4RuntimeService) -> Iterator[None]:
    """Keep the switch's statistics in a file, written every second and at the end.

    Raise `UsageError` if it cannot be written at first. Later errors are logged.
    """
    stop = threading.Event()

    def write() -> None:
        unfinished = path.with_name(path.name + ".new")
        unfinished.write_text(json.dumps(statistics(switch, service), indent=1))
        os.replace(unfinished, path)

    def repeat() -> None:
        last = False
        while not last:
            last = stop.wait(STATS_INTERVAL_S)
            try:
                write()
            except OSError as error:
                log.warning("statistics could not be written: %s", error)

    try:
        write()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    thread = threading.Thread(target=repeat, name="statistics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def metrics(options: Options, switch: SoftSwitch, service: P4RuntimeService) -> MetricsServer:
    """Return a server of metrics. Raise `UsageError` if it cannot be had."""
    assert options.metrics is not None
    try:
        with needs("softswitch --metrics", "metrics"):
            from checkmate.base.metrics import MetricsError, MetricsServer  # noqa: PLC0415
            from softswitch.metrics import families  # noqa: PLC0415
    except ExtraMissing as error:
        raise UsageError(str(error)) from None
    try:
        return MetricsServer(
            options.metrics,
            lambda: families(statistics(switch, service), options.device_id, len(service.sessions.primaries)),
            lambda: "" if service.has_pipeline else "no program is loaded",
        )
    except MetricsError as error:
        raise UsageError(str(error)) from None


def statistics(switch: SoftSwitch, service: P4RuntimeService) -> dict[str, object]:
    """Return the counters of every port, and of packets without a receiver, with the current `time`."""
    now = time.time()
    with _COUNTING:
        ports = {
            str(number): {"interface": port.name, "rx_dropped": port.drop_count()} | asdict(port.stats)
            for number, port in switch.ports.items()
        }
    return {
        "time": now,
        "ports": ports,
        "unknown_port": switch.unknown_port,
        "packet_in_dropped": service.sessions.dropped,
        "packet_in_unheard": service.sessions.unheard,
    }
