"""Names that docstrings, comments and packages' READMEs mention exist."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
WORD: Final = re.compile(r"[A-Za-z_]\w*")
MENTION: Final = re.compile(r"`([A-Za-z_][\w./]*)(?:\(\))?`")
ARGUMENT: Final = re.compile(r"(?m)^    (\w+):")
SUFFIXES: Final = {
    "c",
    "cfg",
    "cpp",
    "h",
    "js",
    "json",
    "jsonl",
    "key",
    "lua",
    "md",
    "nft",
    "p4",
    "proto",
    "py",
    "sbatch",
    "service",
    "sh",
    "so",
    "toml",
    "txt",
    "yaml",
    "yml",
}
"""Of files, so that `shadow.proto` is not taken for a name in a module."""
OTHERS: Final = {
    *("direct_counter_read", "device_mgr", "entry_with_A", "_pi_update_device_start"),
    *(
        "BfPipelineConfig",
        "bf_pipeline_builder",
        "bfrtcli",
        "bf_rt_port_tf1",
        "bf_rt_tm_tf1",
        "bf_rt_pre_tf1",
    ),
    *("bf_rt_dev_tf1", "lld_sku", "tm_tofino", "tm_tof2", "mc_mgr_rdm", "buffer_headroom_barefoot"),
    *("stratum", "hal", "barefoot", "bf", "lld", "traffic_mgr", "init", "mc_mgr", "cfgmgr"),
    *("mv", "su", "b_", "c_"),
    *("checkmate.v1.Shadow", "state.NAME.exp_avg", "layers.0", "cfgmgr/buffer_headroom_barefoot.lua"),
}
"""Names of other projects and of the system, and beginnings of names."""


@dataclass(frozen=True)
class Mention:
    """A name in backticks, and where it is."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass
class Names:
    """All names of a tree: words of its code, and those of each Python module."""

    words: set[str] = field(default_factory=set)
    by_module: dict[Path, set[str]] = field(default_factory=dict)
    modules: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    """Modules and packages by their own name."""

    def add_python(self, file: Path, tree: ast.Module, docstrings: set[int]) -> None:
        """Add a module's names, and the words of its texts without docstrings."""
        names: set[str] = set()
        for node in ast.walk(tree):
            names.update(
                value
                for attribute in ("id", "attr", "name", "arg", "asname")
                if isinstance(value := getattr(node, attribute, None), str)
            )
            if isinstance(node, ast.alias):
                names.update(node.name.split("."))
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                names.update(WORD.findall(str(node.value)))
        self.by_module[file] = names
        self.modules[file.parent.name if file.stem == "__init__" else file.stem].append(file)
        self.words |= names

    def lacks(self, mention: Mention) -> bool:
        """Return whether a mentioned name exists nowhere, or not in the module that it is said to be in."""
        if mention.text in OTHERS:
            return False
        parts = [part for part in re.split(r"[./]", mention.text) if part]
        if any(part not in self.words and not part.isdecimal() for part in parts):
            return True
        if len(parts) < 2 or "/" in mention.text or parts[-1] in SUFFIXES:
            return False
        modules = self._candidates(mention.file, parts[0])
        return bool(modules) and not any(self._has(module, parts[1:]) for module in modules)

    def _candidates(self, file: Path, name: str) -> list[Path]:
        """Return the modules that a name may mean: the nearest ones; none if it names no module."""
        modules = self.modules.get(name, [])
        for folder in (file.parent, *file.parent.parents):
            near = [module for module in modules if module.is_relative_to(folder)]
            if near:
                return near
        return []

    def _has(self, module: Path, rest: list[str]) -> bool:
        if rest[0] in self.by_module[module]:
            return True
        if module.stem != "__init__":
            return False
        inner = [module.parent / f"{rest[0]}.py", module.parent / rest[0] / "__init__.py"]
        return (
            any(file in self.by_module and (not rest[1:] or self._has(file, rest[1:])) for file in inner)
            or (ROOT / module.parent / f"{rest[0]}.{rest[-1]}").exists()
        )


def tracked() -> list[Path]:
    """Return the paths of all files that git has, below the root."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.splitlines() if (ROOT / name).is_file()]


@cache
def syntax_tree(file: Path) -> ast.Module:
    """Return a module's syntax tree, which several tests read."""
    return ast.parse((ROOT / file).read_text())


def mentions_of(file: Path, first_line: int, text: str) -> Iterator[Mention]:
    """Yield the names in backticks of a text that begins in a line of a file."""
    for number, line in enumerate(text.split("\n"), start=first_line):
        yield from (Mention(file, number, match[1]) for match in MENTION.finditer(line))


def read_python(file: Path, names: Names) -> list[Mention]:
    """Add a module's names; return what its docstrings and comments mention."""
    source = (ROOT / file).read_text()
    tree = syntax_tree(file)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        statement.value
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ]
    names.add_python(file, tree, {id(value) for value in docstrings})
    mentions = [m for value in docstrings for m in mentions_of(file, value.lineno, str(value.value))]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            mentions += mentions_of(file, token.start[0], token.string)
    return mentions


def missing(files: list[Path]) -> list[Mention]:
    """Return what documentation of the product mentions and nothing has."""
    names = Names(words=OTHERS | SUFFIXES)
    mentions: list[Mention] = []
    for file in files:
        names.words.update(part for path in (file, *file.parents) for part in (path.name, path.stem))
        if file.suffix == ".py" and not file.match("*_pb2*.py"):
            mentions += read_python(file, names)
        elif file.name == "README.md" and len(file.parts) > 1:
            prose = re.sub(
                r"(?ms)^```.*?^```", lambda fence: "\n" * fence[0].count("\n"), (ROOT / file).read_text()
            )
            mentions += mentions_of(file, 1, prose)
        elif file.suffix not in (".md", ".png", ".svg"):
            names.words.update(WORD.findall((ROOT / file).read_text(errors="ignore")))
    return [m for m in mentions if m.file.parts[0] not in ("tests", "docs") and names.lacks(m)]


def test_names_in_docstrings_comments_and_readmes_exist() -> None:
    assert [str(mention) for mention in missing(tracked())] == []


def stale_arguments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield names under `Args:` in a docstring that the function lacks, each with the function's line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _, _, described = (ast.get_docstring(node) or "").partition("Args:\n")
            described = re.split(r"\n\S", described)[0]
            names = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
            yield from ((node.lineno, name) for name in ARGUMENT.findall(described) if name not in names)


def test_arguments_that_docstrings_describe_are_parameters() -> None:
    files = [file for file in tracked() if file.suffix == ".py" and not file.match("*_pb2*.py")]
    stale = [(file, *found) for file in files for found in stale_arguments(syntax_tree(file))]
    assert [f"{file}:{line}: {name}" for file, line, name in stale] == []


def test_an_argument_of_before_is_found() -> None:
    tree = ast.parse(
        'def call(a, *, b=1):\n    """Do it.\n\n    Args:\n        a: One.\n        c: Gone.\n    """\n'
    )
    assert list(stale_arguments(tree)) == [(1, "c")]


def test_a_stale_name_is_found() -> None:
    """Names that nothing has, and functions of other modules than it is said."""
    names = Names(words={"outer"})
    tree = ast.parse("def made():\n    return inner.value\n")
    for path in ("pkg/inner.py", "pkg/__init__.py", "other/inner.py"):
        names.add_python(Path(path), tree if path == "pkg/inner.py" else ast.parse("gone = 1"), set())
    at = Path("pkg/x.py")
    stale = ["inner.gone", "nowhere", "inner.nowhere", "pkg.nowhere"]
    assert [
        text for text in (*stale, "inner.made", "gone", "outer") if names.lacks(Mention(at, 1, text))
    ] == stale
