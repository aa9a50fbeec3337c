"""Job files by anybody: a small file can't become a large job, and any text is a job or a list of faults."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from checkmate.job import yaml_lines
from checkmate.job.fields import FILE_BYTES
from checkmate.job.files import JobError, read_job
from checkmate.job.schema import Job
from checkmate.job.validation import FAULTS_MOST
from checkmate.job.yaml_lines import SCALAR_CHARACTERS, Located
from testbed.jobs import job_data
from tests.support.cli import invoke
from tests.support.fuzz import fuzz

RIGHT = yaml.safe_dump(job_data(nodes=2, channels=2, replicas=2), sort_keys=False)


def faults(file: Path, text: str) -> tuple[Located, ...]:
    file.write_text(text)
    with pytest.raises(JobError) as excinfo:
        read_job(file)
    return excinfo.value.faults


def doubled(levels: int, width: int = 10) -> str:
    """Return lists within lists, `width` to the power of `levels` values in all."""
    text = "a0: &a0 [1]\n"
    for level in range(1, levels + 1):
        text += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]\n"
    return text


def merged(levels: int) -> str:
    text = "a0: &a0 {k: 1}\n"
    for level in range(1, levels + 1):
        text += f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n"
    return text


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (doubled(9), 6, "has more than 200,000 values, with those that aliases repeat"),
        (merged(9), 6, "has more than 200,000 values"),
        ("job: &a [*a]", 1, "the alias *a is within what it stands for"),
        ("job: a\nx: &a {b: {c: *a}}", 2, "the alias *a is within what it stands for"),
        ("job: a\nx: " + "[" * 3000, 2, "nested more than 40 levels deep"),
        ("job: a\nx: " + "{a: " * 3000, 2, "nested more than 40 levels deep"),
        ("job: a\nx: 0x" + "f" * 4000, 2, "a value of 4,002 characters, more than 1,024"),
    ],
)
def test_a_small_file_does_not_become_a_large_job(tmp_path: Path, text: str, line: int, message: str) -> None:
    tracemalloc.start()
    (fault,) = faults(tmp_path / "job.yaml", text)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (fault.line, fault.path) == (line, "(YAML)")
    assert message in fault.message
    assert most < 20 << 20


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path / "job.yaml", "#" * (FILE_BYTES + 1))
    assert "is larger than 2 MiB" in fault.message
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")  # its size is 0
    with pytest.raises(JobError, match="is larger than 2 MiB"):
        read_job(tmp_path / "zero.yaml")


def test_a_fabric_file_has_the_same_bounds(tmp_path: Path) -> None:
    (tmp_path / "fabric.yaml").write_text(doubled(9))
    messages = {
        fault.file.name: fault.message for fault in faults(tmp_path / "job.yaml", "fabric: fabric.yaml")
    }
    assert "has more than 200,000 values" in messages["fabric.yaml"]


def test_aliases_are_of_use(tmp_path: Path) -> None:
    data = job_data()
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data).replace("job: ", "job: &name ", 1))
    assert read_job(file).job == data["job"]


def test_equal_faults_without_end_are_counted(tmp_path: Path) -> None:
    text = "channels: &a {rank: z}\ndp_groups: [{ranks: [" + ", ".join(["*a"] * 5000) + "]}]\n"
    located = faults(tmp_path / "job.yaml", text)
    assert len(located) == FAULTS_MOST + 1
    assert any("other faults; correct these first" in fault.message for fault in located)


def test_a_fault_shows_a_value_in_part(tmp_path: Path) -> None:
    long = "x" * SCALAR_CHARACTERS
    (fault,) = [f for f in faults(tmp_path / "job.yaml", f"channels: {long}") if f.path == "channels"]
    assert len(fault.message) < 200


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("replicas: 2", "replicas: {}"),
        ("shadow_nodes:\n- id: 0", "shadow_nodes:\n- id: {}"),
        ("rank: 1", "rank: {}"),
        ("dp_groups:\n- ranks:", "dp_groups:\n- shadow_nodes: [0, {0}, {0}]\n  ranks:"),
    ],
)
def test_a_huge_number_is_shown_in_part(tmp_path: Path, right: str, wrong: str) -> None:
    assert right in RIGHT
    located = faults(tmp_path / "job.yaml", RIGHT.replace(right, wrong.format("0x" + "f" * 900)))
    assert located
    assert all(len(fault.message) < 300 for fault in located)
    assert len({(fault.line, fault.path) for fault in located}) == len(located)


ODD = st.sampled_from(
    [
        *("~", "[]", "{}", "-1", "1e999", ".nan", "true", "[[1]]", "{1: 2}", "{null: 1}", "{[a]: 1}"),
        *("!!int a", "!!binary x", "!!set {a}", "!!omap [a: 1]", "!!timestamp x", "!!float ''", "!!bool x"),
        *(
            "!!python/object:os.system x",
            "? [a]\n: 1",
            "*a",
            "&a a",
            "<<: {a: 1}",
            "<<: 1",
            "%YAML 1.9",
            "---",
        ),
        *(
            '"\\ud800"',
            '"\\UFFFFFFFF"',
            "1:1:1.0",
            "2001-13-01",
            "0x" + "f" * 900,
            "\0",
            "\ufeff",
            "\U0001f600",
        ),
        *("10.0.0.1", "10.0.0.1:99999", "[::1]:1", "02:00:00:00:00:01", "ff:ff:ff:ff:ff:ff", str(2**70)),
    ]
)


@st.composite
def changed_texts(draw: st.DrawFn) -> str:
    """Return the text of a right job with some of its lines changed, repeated or removed."""
    lines = RIGHT.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        match draw(st.integers(0, 5)):
            case 0:
                lines[at] = line.split(":")[0] + ": " + draw(ODD)
            case 1:
                del lines[at]
            case 2:
                lines.insert(at, lines[draw(st.integers(0, len(lines) - 1))])
            case 3:
                column = draw(st.integers(0, len(line)))
                lines[at] = line[:column] + draw(st.characters(exclude_categories=[])) + line[column:]
            case 4:
                lines[at] = line[: len(line) - len(line.lstrip())] + draw(ODD)
            case _:
                lines[at] = line.rpartition(" ")[0] + " " + draw(ODD)
    return "\n".join(lines)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(sorted(field.name for field in fields(Job)))
documents = st.dictionaries(KEYS | st.text(max_size=9), plain, max_size=6).map(yaml.safe_dump)


@fuzz(250, text=changed_texts() | documents | st.text(st.characters(exclude_categories=[]), max_size=60))
def test_any_text_is_a_job_or_a_list_of_faults(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome: Any
    try:
        outcome = read_job(file)
    except JobError as error:
        assert error.faults
        str(error).encode()  # it can be printed
        assert all(len(str(fault)) < 1000 + len(str(file)) for fault in error.faults)
    else:
        assert isinstance(outcome, Job)


def parsed(load: Callable[[str], Any], text: str) -> object:
    """Return the data of a text and the lines of its paths, or the reason if it is not YAML."""
    try:
        data, lines = yaml_lines._parsed(load(text))
    except (yaml.YAMLError, ValueError, OverflowError):
        return None
    return repr((data, lines if data is not None else "an empty document"))


needs_libyaml = pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
TOKENS = st.sampled_from(
    [*"[]{}:,-?#|>&*!%@`'\"~", ": ", "- ", "\n", "\n  ", " #", "|-", ">2", "a", "b c", "1", "{}", "---"]
)
tokens = st.lists(TOKENS, max_size=14).map("".join)


@needs_libyaml
@fuzz(
    250,
    text=changed_texts() | documents | tokens | st.text(st.characters(exclude_categories=[]), max_size=60),
)
def test_libyaml_reads_what_python_reads(text: str) -> None:
    """Faults are always told by the parser in Python, which may accept what libyaml does not."""
    if yaml_lines.control_character(text) is not None or yaml_lines._DIFFERENT.search(text):
        return
    fast = parsed(yaml_lines._fast, text)
    if fast is not None:
        assert fast == parsed(yaml_lines.Loader, text)


@needs_libyaml
@pytest.mark.parametrize(
    "text", ["a: >-#note\n  b", "[a? b]", "{port? : 3}", "0\t", "!", "a: 1\n\ufeff\nb: 2"]
)
def test_what_the_parsers_read_in_other_ways_is_read_in_python(text: str) -> None:
    assert parsed(yaml_lines._fast, text) != parsed(yaml_lines.Loader, text)
    assert yaml_lines._DIFFERENT.search(text)


@needs_libyaml
def test_a_right_job_and_our_own_faults_need_no_parser_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_lines, "Loader", None)
    file = tmp_path / "job.yaml"
    file.write_text(RIGHT)
    assert read_job(file).channels == 2
    for text, message in ((doubled(9), "more than 200,000 values"), ("job: a\njob: b", "given twice")):
        assert message in faults(file, text)[0].message
    assert invoke("init", tmp_path / "gpt.yaml")[0] == 0  # `init` reads what it writes


def test_without_libyaml_a_job_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(RIGHT)
    job = read_job(file)
    monkeypatch.setattr(yaml_lines, "_fast", yaml_lines.Loader)
    assert read_job(file) == job
