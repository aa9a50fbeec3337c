"""The switch as a process: its addresses, whom it admits, and its privileges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from finsy.proto import p4r, p4r_grpc

from tests.softswitch.support.client import DEVICE, Client, Wires, needs_root, sh
from tests.softswitch.support.process import process


def test_addresses_that_cannot_be_used() -> None:
    with process("--no-p4", "--grpc-server-addr", "127.0.0.1:0") as (_, occupied):
        for address, words in (
            (occupied, "Address already in use"),
            ("192.0.2.1:9559", "Cannot assign requested address"),
        ):
            second = subprocess.run(
                [sys.executable, "-m", "softswitch", "--no-p4", "--insecure", "--grpc-server-addr", address],
                capture_output=True,
                text=True,
                check=False,
            )
            assert second.returncode == 2
            assert second.stderr.endswith(f"softswitch: cannot listen on {address}: {words}\n")


NET_ADMIN, NET_RAW = 1 << 12, 1 << 13


def check_privileges(pid: int, capabilities: int) -> None:
    """Check that each thread of a process has these capabilities, and can gain no others."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        lines = (line.split(":", 1) for line in (thread / "status").read_text().splitlines())
        status = {name: value.strip() for name, value in lines}
        assert status["NoNewPrivs"] == "1"
        for name in ("CapPrm", "CapEff", "CapBnd"):
            assert int(status[name], 16) == capabilities, (thread, name, status[name])
        assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0


@needs_root
def test_privileges_are_dropped(wires: Wires) -> None:
    """The remaining capabilities open an interface that was replaced."""
    with process("--no-p4", "--grpc-server-addr", "127.0.0.1:0") as (running, address):
        client = Client(address)
        client.arbitration()
        check_privileges(running.pid, 0)
        client.close()
    with process("--no-p4", "-i", "1@s1", "-i", "2@s2", inside=wires.switch) as (running, _):
        check_privileges(running.pid, NET_ADMIN | NET_RAW)
        inside = f"nsenter --net=/run/netns/{wires.switch} ip link"
        sh(f"{inside} del s2")
        sh(f"{inside} add s2 type veth peer name e1 netns {wires.hosts[2]} && {inside} set s2 up")
        sh(f"nsenter --net=/run/netns/{wires.hosts[2]} ip link set e1 up")
        assert running.stderr is not None
        assert "s2) is down" in running.stderr.readline()
        assert "s2) is up again" in running.stderr.readline()
        described = sh(f"nsenter --net=/run/netns/{wires.switch} ip -d link show s2")
        assert "promiscuity 1" in described


CLIENTS = {
    "controller": "URI:checkmate:gpt/controller",
    "reader": "URI:checkmate:gpt/reader",
    "nobody": "DNS:controller.example",
    "several": "URI:checkmate:gpt/controller,URI:checkmate:gpt/reader",
    "longer": "URI:checkmate:gpt/controller/x",
}
"""Subject alternative names of clients."""


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Return an authority, and a server's and clients' certificates from it."""
    folder = tmp_path
    request = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    sh(f"{request} -x509 -days 2 -subj /CN=authority -keyout {folder}/ca.key -out {folder}/ca.pem")
    for name, names in {"server": "IP:127.0.0.1", **CLIENTS}.items():
        (folder / "san").write_text(f"subjectAltName={names}")
        sh(f"{request} -subj /CN={name} -keyout {folder}/{name}.key -out {folder}/{name}.csr")
        sh(
            f"openssl x509 -req -in {folder}/{name}.csr -CA {folder}/ca.pem -CAkey {folder}/ca.key -days 2 "
            f"-CAcreateserial -extfile {folder}/san -out {folder}/{name}.pem"
        )
    return folder


def answer(address: str, credentials: grpc.ChannelCredentials, call: str) -> grpc.StatusCode:
    """Return the status of a call, with arbitration as a stream's first message."""
    with grpc.secure_channel(address, credentials) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        hello = p4r.StreamMessageRequest()
        hello.arbitration.device_id = DEVICE
        hello.arbitration.election_id.low = 1
        try:
            if call == "StreamChannel":
                next(stub.StreamChannel(iter([hello]), timeout=5))
            elif call == "Write":
                stub.Write(p4r.WriteRequest(device_id=DEVICE), timeout=5)
            else:
                stub.Capabilities(p4r.CapabilitiesRequest(), timeout=5)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_tls_admits_controllers_only(certificates: Path) -> None:
    read = {path.name: path.read_bytes() for path in certificates.iterdir()}
    tls = ["--grpc-server-ssl", "--grpc-server-addr", "127.0.0.1:0"]
    for option, file in (("cert", "server.pem"), ("key", "server.key"), ("cacert", "ca.pem")):
        tls += [f"--grpc-server-{option}", f"{certificates}/{file}"]
    with process("--no-p4", *tls) as (_, address):
        for name in CLIENTS:
            credentials = grpc.ssl_channel_credentials(
                read["ca.pem"], read[f"{name}.key"], read[f"{name}.pem"]
            )
            for call in ("StreamChannel", "Write", "Capabilities"):
                code = answer(address, credentials, call)
                assert (code == grpc.StatusCode.UNAUTHENTICATED) == (name != "controller"), (name, call)
        stranger = grpc.ssl_channel_credentials(read["ca.pem"])
        assert answer(address, stranger, "Capabilities") == grpc.StatusCode.UNAVAILABLE


def test_insecure_warns() -> None:
    with process("--no-p4", "--grpc-server-addr", "0.0.0.0:0", "--insecure") as (running, _):
        assert running.stderr is not None
        warning = running.stderr.readline()
        assert warning == "softswitch: --insecure: whoever reaches 0.0.0.0:0 controls this switch\n"
