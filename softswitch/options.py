"""Command-line options: those of simple_switch_grpc, so that the two switches are interchangeable."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

import grpc

DEFAULT_ADDRESS = "127.0.0.1:9559"
METRICS_ADDRESS = "127.0.0.1:9460"
"""An example."""
P4INFO_SUFFIXES = (".p4info.txtpb", ".p4info.txt", ".p4info.pb.txt")

_EXAMPLE = """\
example:
  softswitch -i 1@veth1 -i 2@veth2 --device-id 1 --no-p4 --grpc-server-addr 127.0.0.1:9559 --cpu-port 510

simple_switch_grpc's own syntax works too:
  softswitch -i 1@veth1 program.json -- --cpu-port 510

Exit status: 0 after SIGINT or SIGTERM; 2 if an argument is invalid or a resource unavailable.
"""


class UsageError(Exception):
    """An invalid argument or an unavailable resource; the message has one line with the remedy."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a switch."""

    interfaces: dict[int, str]
    device_id: int
    cpu_port: int | None
    address: str
    config: Path | None
    """BMv2 JSON of the initial program; the P4Info is beside it."""
    trace: bool
    verbose: bool
    stats_file: Path | None
    tls: ServerTls | None
    exposed: bool
    """Other hosts may reach `address` without TLS."""
    thrift_port: int | None
    metrics: str | None
    """HOST:PORT at which metrics are served."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's PEM files; `authority` is of clients, which need a certificate."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> Callable[[], grpc.ServerCredentials]:
        """Read the files, and return what makes credentials of them, which starts threads.

        Raises:
            UsageError: A file is not readable.
        """
        try:
            key, certificate = self.key.read_bytes(), self.certificate.read_bytes()
            authority = self.authority.read_bytes()
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        return partial(
            grpc.ssl_server_credentials,
            [(key, certificate)],
            root_certificates=authority,
            require_client_auth=True,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="softswitch",
        description="Run a compiled v1model P4 program behind P4Runtime, on network interfaces.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="PROGRAM.json", help="BMv2 JSON; its P4Info is beside it")
    add("--no-p4", action="store_true", help="start without a program; a controller sets it")
    add(
        "-i",
        "--interface",
        action="append",
        default=[],
        metavar="PORT@INTERFACE",
        help="port number and interface; repeat for each port",
    )
    add("--device-id", type=int, default=0, metavar="ID", help="P4Runtime device id (0)")
    add("--cpu-port", type=int, metavar="PORT", help="port number for packet-in and packet-out (none)")
    add("--grpc-server-addr", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"({DEFAULT_ADDRESS})")
    add(
        "--grpc-server-ssl",
        action="store_true",
        help="TLS for P4Runtime; clients need a certificate with a URI checkmate:JOB/controller",
    )
    add("--grpc-server-cacert", type=Path, metavar="PEM", help="certificate authority of clients")
    add("--grpc-server-cert", type=Path, metavar="PEM", help="the server's certificate")
    add("--grpc-server-key", type=Path, metavar="PEM", help="the server's key")
    add(
        "--grpc-server-with-client-auth",
        action="store_true",
        help="implied by --grpc-server-ssl, for compatibility with BMv2",
    )
    add(
        "--insecure",
        action="store_true",
        help="let everybody who reaches --grpc-server-addr control the switch, without TLS",
    )
    add("--thrift-port", type=int, metavar="PORT", help="ignored, for compatibility with BMv2")
    add("--log-console", action="store_true", help="log controllers and links on stderr")
    add("--trace", action="store_true", help="print a trace of each packet")
    add(
        "--stats-file",
        type=Path,
        metavar="JSON",
        help="write statistics to this file every second, and at exit",
    )
    add("--metrics", metavar="HOST:PORT", help="serve metrics for Prometheus there (nowhere)")
    return parser


def parse(arguments: Sequence[str]) -> Options:
    """Return the options of a command line, with or without `--` before those of the target.

    Raises:
        UsageError: The command line is invalid.
    """
    options = _parser().parse_args([argument for argument in arguments if argument != "--"])
    if options.no_p4 == (options.config is not None):
        raise UsageError("specify either --no-p4 or the path of a program's JSON")
    if options.device_id < 0:
        raise UsageError(f"--device-id {options.device_id}: must not be negative")
    host = _host(options.grpc_server_addr, "--grpc-server-addr", DEFAULT_ADDRESS)
    if options.metrics is not None:
        _host(options.metrics, "--metrics", METRICS_ADDRESS)
    tls = _tls(options)
    exposed = tls is None and not is_loopback(host)
    if exposed and not options.insecure:
        raise UsageError(
            f"--grpc-server-addr {options.grpc_server_addr}: an address that is not loopback needs "
            "--grpc-server-ssl, or --insecure if nobody else reaches it"
        )
    interfaces = _interfaces(options.interface)
    cpu_port = options.cpu_port
    if cpu_port is not None and cpu_port <= 0:
        raise UsageError(f"--cpu-port {cpu_port}: must be positive")
    if cpu_port in interfaces:
        raise UsageError(f"--cpu-port {cpu_port} is also the port of {interfaces[cpu_port]}")
    return Options(
        interfaces=interfaces,
        device_id=options.device_id,
        cpu_port=cpu_port,
        address=options.grpc_server_addr,
        config=options.config,
        trace=options.trace,
        verbose=options.log_console,
        stats_file=options.stats_file,
        tls=tls,
        exposed=exposed,
        thrift_port=options.thrift_port,
        metrics=options.metrics,
    )


def _host(address: str, option: str, example: str) -> str:
    """Return the host of HOST:PORT. Raise `UsageError` if it is not that."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise UsageError(f"{option} {address}: must be an address such as {example}")
    return host


def _interfaces(arguments: list[str]) -> dict[int, str]:
    interfaces: dict[int, str] = {}
    for argument in arguments:
        number, _, name = argument.partition("@")
        if not number.isdecimal() or not name:
            raise UsageError(f"-i {argument}: must be NUMBER@INTERFACE, such as 1@veth0")
        if int(number) in interfaces:
            raise UsageError(f"-i {argument}: port {number} is already {interfaces[int(number)]}")
        if name in interfaces.values():
            raise UsageError(f"-i {argument}: {name} is already a port")
        interfaces[int(number)] = name
    return interfaces


def _tls(options: argparse.Namespace) -> ServerTls | None:
    if not options.grpc_server_ssl:
        if options.grpc_server_cert or options.grpc_server_key or options.grpc_server_cacert:
            raise UsageError("certificates need --grpc-server-ssl")
        if options.grpc_server_with_client_auth:
            raise UsageError("--grpc-server-with-client-auth needs --grpc-server-ssl")
        return None
    if options.grpc_server_cert is None or options.grpc_server_key is None:
        raise UsageError("--grpc-server-ssl needs --grpc-server-cert and --grpc-server-key")
    if options.grpc_server_cacert is None:
        raise UsageError("--grpc-server-ssl needs --grpc-server-cacert, the clients' authority")
    if options.insecure:
        raise UsageError("specify either --grpc-server-ssl or --insecure")
    return ServerTls(options.grpc_server_cert, options.grpc_server_key, options.grpc_server_cacert)


def is_loopback(host: str) -> bool:
    """Return whether only this host's processes reach an address; of names, that is known of `localhost`."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def p4info_path(config: Path) -> Path:
    """Return the P4Info beside a program's JSON; raise `UsageError` if there is none."""
    candidates = [config.with_suffix(suffix) for suffix in P4INFO_SUFFIXES]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UsageError(f"{config}: no P4Info beside it; looked for {', '.join(map(str, candidates))}")
