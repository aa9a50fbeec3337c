"""`checkmate init` writes a job file that is valid, and overwrites nothing."""

from __future__ import annotations

import mmap
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from checkmate.job.files import read_job
from tests.support.cli import COMMAND, invoke
from tests.support.labs.live import needs_root
from tests.support.terminal import AtTerminal
from tests.support.waiting import wait_until
from topologies.kernel import mounts


@pytest.mark.parametrize("target", ["softswitch", "bmv2", "tofino", "tofino2"])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--ranks", "gpu0,fd00::2,gpu2.example.org", "--shadow-nodes", "cpu0", "--nics", "2"],
        ["--ranks", "4", "--gpus-per-host", "8", "--shadow-nodes", "8"],
        ["--ranks", "20", "--shadow-nodes", "3", "--channels", "8", "--replicas", "2", "--job", "llama"],
    ],
)
def test_what_it_writes_is_valid(tmp_path: Path, target: str, options: list[str]) -> None:
    file = tmp_path / "gpt 1.yaml"
    name = [] if "--job" in options else ["--job", "gpt"]
    code, output = invoke("init", file, "--target", target, *options, *name)
    assert code == 0, output
    assert f"checkmate validate '{file}'" in output
    code, output = invoke("validate", file)
    assert (code, output.partition(":")[0]) == (0, options[-1] if "--job" in options else "gpt"), output
    assert all(len(line) <= 110 for line in file.read_text().splitlines())


def test_options_are_in_the_file(tmp_path: Path) -> None:
    options = [
        "--collective",
        "nccl",
        "--network",
        "10.8.0.0/14",
        "--switch",
        "10.1.1.1:9559",
        "--keys",
        "/etc/keys",
    ]
    invoke("init", tmp_path / "gpt.yaml", "--ranks", "a,b", "--shadow-nodes", "c,d", "--nics", "2", *options)
    job = read_job(tmp_path / "gpt.yaml")
    assert job.collective == "nccl"
    (group,), (switch,) = job.dp_groups, job.fabric.switches
    assert [(rank.mgmt, str(rank.ip)) for rank in group.ranks] == [("a", "10.8.0.1"), ("b", "10.8.0.2")]
    assert [(node.mgmt, len(node.nics)) for node in job.shadow_nodes] == [("c:7000", 2), ("d:7000", 2)]
    assert (switch.address, str(job.keys)) == ("10.1.1.1:9559", "/etc/keys")


@pytest.mark.parametrize(
    ("options", "ranks", "addresses"),
    [
        (["--ranks", "16"], [[*range(16)]], ["shadow0:7000"]),
        (["--ranks", "1", "--shadow-nodes", "127.0.0.1"], [[0]], ["127.0.0.1:7000"]),
        (
            ["--mesh", "dp_replicate=2, dp_shard=2", "--shadow-nodes", "a:71,fd00::1", "--replicas", "2"],
            [[0, 2], [1, 3]],
            ["a:71", "[fd00::1]:7000"],
        ),
        (["--mesh", "dp_shard=2"], [[0], [1]], ["shadow0:7000"]),
    ],
)
def test_a_file_with_copies_by_hosts(
    tmp_path: Path, options: list[str], ranks: list[list[int]], addresses: list[str]
) -> None:
    file = tmp_path / "gpt.yaml"
    code, output = invoke("init", file, "--copies", "host", "--keys", "/etc/keys", *options)
    assert code == 0, output
    commands = (f"validate {file}", f"keys {file}", f"shadow {file} --id 0")
    assert all(f"checkmate {command}" in output for command in commands)
    assert f"CHECKMATE_JOB={file} torchrun" in output
    assert ("replace the addresses marked (*)" in output) == ("--shadow-nodes" not in options)
    assert invoke("validate", file)[0] == 0
    job = read_job(file)
    assert (job.job, job.copies, str(job.keys)) == ("gpt", "host", "/etc/keys")
    assert [[rank.rank for rank in group.ranks] for group in job.dp_groups] == ranks
    assert [node.mgmt for node in job.shadow_nodes] == addresses
    assert job.replicas == (2 if "--replicas" in options else 1)
    assert "switch" not in file.read_text()
    assert all(len(line) <= 110 for line in file.read_text().splitlines())


def test_several_gpus_per_host_are_a_mesh(tmp_path: Path) -> None:
    options = ["--ranks", "a,b", "--gpus-per-host", "2", "--shadow-nodes", "2"]
    code, output = invoke("init", tmp_path / "gpt.yaml", *options)
    assert code == 0, output
    job = read_job(tmp_path / "gpt.yaml")
    assert [[rank.rank for rank in group.ranks] for group in job.dp_groups] == [[0, 2], [1, 3]]
    assert [(rank.host, rank.mgmt) for group in job.dp_groups for rank in group.ranks] == [
        ("a", "a"),
        ("b", "b"),
    ] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--ranks", "0"],
            "--ranks must be a number from 2 to 500, as the ports of one switch hold, or hosts such as",
        ),
        (["--ranks", "a,,b"], "--ranks must be a number"),
        (["--ranks", "1", "--gpus-per-host", "8"], "--ranks must be a number from 2 to 500"),
        (["--ranks", "a,b,A"], "--ranks has a, A more than once: each must be a host of its own"),
        (["--shadow-nodes", "s,s"], "--shadow-nodes has s more than once"),
        (["--ranks", "gpu0"], "--ranks must be a number from 2 to 500"),
        (["--shadow-nodes", "0"], "--shadow-nodes must be a number from 1 to 500"),
        (
            ["--ranks", "400", "--shadow-nodes", "60", "--nics", "2"],
            "400 hosts of ranks and 120 NICs of shadow nodes need 520 ports, and one switch has 509",
        ),
        (["--ranks", "100", "--target", "tofino"], "and 66 more faults"),
        (["--replicas", "2"], "replicas: 2 replicas need as many shadow nodes"),
        (["--collective", "gloo"], "--collective must be ring, tree or nccl, not gloo"),
        (["--target", "asic"], "--target must be softswitch, bmv2, tofino or tofino2, not asic"),
        (["--network", "10.0.0.0/24"], "--network must be an IPv4 network of /16 or larger"),
        (["--switch", "nowhere"], "must be host:port"),
        (["--job", "a b"], "must be a name of ASCII letters"),
        (["--copies", "none"], "--copies must be switch or host, not none"),
        (["--mesh", "dp_shard=8"], "--mesh has no effect with --copies switch: leave it out"),
        (["--copies", "host", "--nics", "1"], "--nics has no effect with --copies host: leave it out"),
        (["--copies", "host", "--ranks", "a,b"], "--ranks must be the number of all ranks, from 1 to 65,536"),
        (["--copies", "host", "--ranks", "4", "--mesh", "pp=2"], "ranks and a mesh: give one of them"),
        (["--copies", "host", "--mesh", "dp=2"], "--mesh must be sizes of pp, dp_replicate, dp_shard or tp"),
        (["--copies", "host", "--mesh", "pp=2,pp=2"], "--mesh must be sizes of"),
        (["--copies", "host", "--mesh", "pp"], "--mesh must be sizes of"),
        (["--copies", "host", "--shadow-nodes", "0"], "--shadow-nodes must be the number of shadow nodes"),
        (["--copies", "host", "--shadow-nodes", "s,s"], "mgmt address s:7000 is taken already"),
        (["--copies", "host", "--replicas", "2"], "2 replicas need as many shadow nodes"),
    ],
)
def test_a_wrong_option_writes_nothing(tmp_path: Path, options: list[str], words: str) -> None:
    code, output = invoke("init", tmp_path / "gpt.yaml", *options)
    assert (code, words in output) == (2, True), output
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text("mine")
    (tmp_path / "job.schema.json").write_text("mine")
    code, output = invoke("init", tmp_path / "gpt.yaml")
    assert (code, "exists already, and is not overwritten" in output) == (2, True)
    assert invoke("init", tmp_path / "llama.yaml")[0] == 0
    assert (tmp_path / "gpt.yaml").read_text() == (tmp_path / "job.schema.json").read_text() == "mine"
    for wrong in ("gpt", "none/gpt.yaml", ""):
        assert invoke("init", tmp_path / wrong)[0] == 2


def test_ctrl_c_at_a_question_ends_with_130(tmp_path: Path) -> None:
    with AtTerminal([*COMMAND, "init", str(tmp_path / "gpt.yaml")]) as terminal:
        wait_until(lambda: "copies of gradients" in terminal.words, "a question", 60)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 130
    assert list(tmp_path.iterdir()) == []


def test_ctrl_d_at_a_question_is_an_error(tmp_path: Path) -> None:
    with AtTerminal([*COMMAND, "init", str(tmp_path / "gpt.yaml")]) as terminal:
        wait_until(lambda: "copies of gradients" in terminal.words, "a question", 60)
        terminal.type_keys("\x04")
        assert terminal.process.wait(60) == 1
    assert "error: the answers ended before the last question" in terminal.words
    assert list(tmp_path.iterdir()) == []


@needs_root
@pytest.mark.parametrize(("pages", "name"), [(1, "gpt.yaml"), (2, "job.schema.json")])
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, pages: int, name: str) -> None:
    """The job file does not fit, or only the schema does not."""
    disk = tmp_path / "disk"
    mounts.mount_tmpfs(disk, pages * mmap.PAGESIZE)
    try:
        (disk / "other").write_text("x")
        status, output = invoke("init", disk / "gpt.yaml")
        names = [entry.name for entry in disk.iterdir()]
    finally:
        mounts.unmount_below(tmp_path)
    assert (status, names) == (2, ["other"])
    assert f"{name} cannot be written: No space left on device" in output


def answer_all(folder: Path, options: list[str], answers: bytes) -> bytes:
    """Run `init gpt.yaml` at a terminal with these answers; return its output, once it has ended well."""
    terminal, side = pty.openpty()
    command = [*COMMAND, "init", "gpt.yaml", *options]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=side, stdout=side, stderr=side
    ) as process:
        os.close(side)
        os.write(terminal, answers)
        output = b""
        try:
            while piece := os.read(terminal, 4096):
                output += piece
        except OSError:  # the terminal's end, once the process has closed it
            assert process.wait(timeout=60) == 0, output
    os.close(terminal)
    return output


def test_on_a_terminal_it_asks(tmp_path: Path) -> None:
    """What is on the command line is not asked for; a wrong answer is asked for again."""
    # Ctrl-D at the end: no question waits.
    answers = b"\nm\xc3\xa9\nllama\n0\n1\ngpu0,gpu1\n\n\n4\nbmv2\n\n\x04"
    output = answer_all(tmp_path, ["--nics", "2"], answers)
    job = read_job(tmp_path / "gpt.yaml")
    assert (job.job, job.channels, job.fabric.switches[0].target) == ("llama", 4, "bmv2")
    assert [rank.mgmt for rank in job.dp_groups[0].ranks] == ["gpu0", "gpu1"]
    assert [len(node.nics) for node in job.shadow_nodes] == [2]
    assert output.count(b"hosts of ranks (their number") == 3
    assert output.count(b"name of the job") == 2
    assert output.count(b"must be a number from 2 to 500") == 2
    assert b"NICs of" not in output


def test_it_asks_for_less_with_copies_by_hosts(tmp_path: Path) -> None:
    output = answer_all(tmp_path, [], b"gloo\nhost\n\n0\n8\ncpu0,cpu1\n3\n2\n\x04")
    job = read_job(tmp_path / "gpt.yaml")
    assert (job.job, job.copies, job.replicas, len(job.dp_groups[0].ranks)) == ("gpt", "host", 2, 8)
    assert [node.mgmt for node in job.shadow_nodes] == ["cpu0:7000", "cpu1:7000"]
    assert output.count(b"copies of gradients by") == 2
    assert b"kind of switch" not in output
