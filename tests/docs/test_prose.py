"""The mechanical rules of English: what is found, and what is not."""

from __future__ import annotations

import pytest

from tools.prose import check, files


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("It begins anew.", "anew"),
        ("The file is no text.", "is no t"),
        ("`JobError` where the file is bad.", "`JobError` where"),
        ("Nodes wait, for they have room.", ", for they"),
        ("x" * 121, "x" * 40 + "..."),
    ],
)
def test_what_breaks_a_rule_is_found_with_its_line(line: str, words: str) -> None:
    (fault,) = check("page.md", f"# Title\n\n{line}\n")
    assert (fault.file, fault.line, fault.words) == ("page.md", 3, words)
    assert str(fault).startswith("page.md:3: ")


@pytest.mark.parametrize(
    "line",
    ["It is no longer there.", "as long as it lasts", "It says where the gradient lies.", "| " + "x" * 130],
)
def test_what_breaks_no_rule_is_not_found(line: str) -> None:
    assert list(check("page.md", line)) == []


def test_of_code_only_words_are_looked_at() -> None:
    text = 'anew = 1  # begun anew\nprint("in vain")\nf"{x} so many"\n'
    assert [(fault.line, fault.words) for fault in check("a.py", text)] == [
        (1, "anew"),
        (2, "in vain"),
        (3, "so many"),
    ]
    assert [fault.words for fault in check("a.p4", "anew = 1; // anew\n")] == ["anew"]


def test_every_kind_of_source_is_looked_at() -> None:
    kinds = {name.rpartition(".")[2] for name in files()}
    assert kinds == {"md", "py", "c", "h", "p4", "proto", "sh"}
    assert not [name for name in files() if name.startswith("p4src/build")]
