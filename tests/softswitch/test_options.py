"""The command line: simple_switch_grpc's options, and one clear line for each error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from softswitch.options import UsageError, p4info_path, parse
from softswitch.process import main
from tests.softswitch.support.client import KINDS

TLS = [
    "--grpc-server-ssl",
    "--grpc-server-cert",
    "none",
    "--grpc-server-key",
    "key",
    "--grpc-server-cacert",
    "ca",
]


def test_both_styles_say_the_same() -> None:
    direct = parse(["-i", "1@veth1", "--cpu-port", "510", "--grpc-server-addr", "[::1]:9", "prog.json"])
    separated = parse(
        ["-i", "1@veth1", "prog.json", "--", "--grpc-server-addr", "[::1]:9", "--cpu-port", "510"]
    )
    assert direct == separated
    assert (direct.interfaces, direct.cpu_port, direct.address) == ({1: "veth1"}, 510, "[::1]:9")
    assert direct.config == Path("prog.json")


def test_defaults_are_safe() -> None:
    options = parse(["--no-p4"])
    assert options.address == "127.0.0.1:9559"
    assert (options.device_id, options.cpu_port, options.config, options.tls) == (0, None, None, None)
    assert not options.exposed


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "192.0.2.1", "switch.example", "[::ffff:127.0.0.1]", "10.127.0.1"]
)
def test_other_addresses_than_loopback_need_tls(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--no-p4", "--grpc-server-addr", f"{host}:9559"]
    assert main(arguments) == 2
    assert "needs --grpc-server-ssl, or --insecure" in capsys.readouterr().err
    assert parse([*arguments, "--insecure"]).exposed
    assert not parse([*arguments, *TLS]).exposed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert not parse(["--no-p4", "--grpc-server-addr", f"{host}:9559"]).exposed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "specify either --no-p4 or the path"),
        (["--no-p4", "x.json"], "specify either --no-p4 or the path"),
        (["--no-p4", "-i", "veth0"], "-i veth0: must be NUMBER@INTERFACE, such as 1@veth0"),
        (["--no-p4", "-i", "1@a", "-i", "1@b"], "port 1 is already a"),
        (["--no-p4", "-i", "1@a", "-i", "2@a"], "a is already a port"),
        (["--no-p4", "-i", "1@a", "--cpu-port", "1"], "--cpu-port 1 is also the port of a"),
        (["--no-p4", "--cpu-port", "0"], "--cpu-port 0"),
        (["--no-p4", "--device-id", "-1"], "--device-id -1"),
        (["--no-p4", "--device-id", "one"], "invalid int value: 'one'"),
        (["--no-p4", "--unheard-of"], "--unheard-of"),
        (["--no-p4", "--grpc-server-addr", "localhost"], "must be an address such as 127.0.0.1:9559"),
        (["--no-p4", "--grpc-server-addr", "[::1]:70000"], "must be an address such as 127.0.0.1:9559"),
        (["--no-p4", "--grpc-server-ssl"], "needs --grpc-server-cert"),
        (["--no-p4", *TLS[:5]], "needs --grpc-server-cacert, the clients' authority"),
        (["--no-p4", *TLS, "--insecure"], "either --grpc-server-ssl or --insecure"),
        (["--no-p4", "--grpc-server-cert", "x"], "certificates need --grpc-server-ssl"),
        (["--no-p4", "--grpc-server-with-client-auth"], "needs --grpc-server-ssl"),
    ],
)
def test_wrong_command_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse(arguments)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("softswitch: ")
    assert error.count("\n") == 1


def test_what_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.p4info.txtpb").write_bytes(KINDS.with_suffix(".p4info.txtpb").read_bytes())
    (tmp_path / "worse.json").write_bytes(KINDS.with_suffix(".json").read_bytes())
    (tmp_path / "worse.p4info.txtpb").write_text("tables {")
    alone = tmp_path / "alone.json"
    alone.write_text("{}")
    for arguments, says in (
        ([str(tmp_path / "bad.json")], "bad.json"),
        ([str(tmp_path / "worse.json")], "not a P4Info"),
        ([str(alone)], "no P4Info beside it"),
        ([str(tmp_path / "absent.json")], "absent.json: No such file"),
        (["--no-p4", *TLS], "key: No such file or directory"),
        (["--no-p4", "-i", "1@sp-missing"], "sp-missing"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip()
        assert (says in error, "Traceback" in error) == (True, False), error


def test_p4info_beside_a_program() -> None:
    assert p4info_path(KINDS.with_suffix(".json")) == KINDS.with_suffix(".p4info.txtpb")


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "example:" in capsys.readouterr().out
