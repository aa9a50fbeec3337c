"""Attaching the tagger: clear messages about missing requirements, and no remains."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkmate.tagger import Tagger, TaggerError, TaggerUnavailable, libbpf
from tests.support.labs.end_hosts import needs_root, veth_pair
from tests.support.waiting import wait_until

pytestmark = needs_root


def live_programs() -> set[int]:
    """Return the ids of all BPF programs in this kernel."""
    library = ctypes.CDLL("libbpf.so.1")
    numbers: set[int] = set()
    number = ctypes.c_uint32(0)
    while library.bpf_prog_get_next_id(number, ctypes.byref(number)) == 0:
        numbers.add(number.value)
    return numbers


def test_closing_leaves_nothing() -> None:
    with Tagger.attach() as attached:
        number = attached.program_id
        assert number in live_programs()
    wait_until(lambda: number not in live_programs(), "the program goes")
    with pytest.raises(TaggerError, match="closed"):
        attached.faults()


def test_a_killed_process_leaves_nothing() -> None:
    script = (
        "import time\nfrom checkmate.tagger import Tagger\n"
        "with Tagger.attach() as t: print(t.program_id, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        number = int(process.stdout.readline())
        assert number in live_programs()
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: number not in live_programs(), "the program goes")


def test_it_attaches_where_no_cgroup2_is_to_be_seen() -> None:
    with veth_pair() as pair:
        enter = ["ip", "netns", "exec", pair.a]  # it hides /sys/fs/cgroup
        if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
            pytest.skip("`ip netns exec` doesn't work here: the root directory is not a mount point")
        command = [*enter, sys.executable, "-m", "checkmate.tagger"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "detached again" in result.stdout


def test_missing_clang_is_said_plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaggerUnavailable, match=r"clang.*not on PATH; apt-get install clang"):
        libbpf.object_file(tmp_path)


def test_missing_libbpf_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libbpf, "_LIBRARY", "libbpf-missing.so.1")
    with pytest.raises(TaggerUnavailable, match=r"libbpf-missing\.so\.1 is not installed; apt-get"):
        Tagger.attach()


CAPABILITIES = ("bpf", "perfmon", "net_admin")


def limited_to(*names: str) -> subprocess.CompletedProcess[str]:
    """Try the tagger in a process of root with these capabilities only."""
    bounds = ",".join(["-all", *(f"+{name}" for name in names)])
    command = ["setpriv", f"--bounding-set={bounds}", "--inh-caps=-all", "--no-new-privs"]
    command += [sys.executable, "-m", "checkmate.tagger"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_documented_capabilities_suffice() -> None:
    result = limited_to(*CAPABILITIES)
    assert result.returncode == 0, result.stderr
    assert "detached again" in result.stdout


@pytest.mark.parametrize("lacking", [[name] for name in CAPABILITIES] + [[*CAPABILITIES]], ids="+".join)
def test_missing_capabilities_are_named(lacking: list[str]) -> None:
    result = limited_to(*(name for name in CAPABILITIES if name not in lacking))
    assert result.returncode == 1
    missing = ", ".join(f"CAP_{name.upper()}" for name in lacking)
    assert f"an eBPF program: {missing} missing; start the script, or torchrun, by setpriv" in result.stderr
    assert "Traceback" not in result.stderr
