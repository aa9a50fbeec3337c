"""`checkmate init`: write a commented job file from a few questions or options."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import typer

from checkmate.base.wording import counted
from checkmate.cli.common import UsageFault, out, show_errors
from checkmate.job import editor_schema, starter
from checkmate.job.fields import GPUS_MOST, Collective
from checkmate.job.files import JobError, read_job
from checkmate.job.following import SUFFIXES
from checkmate.job.schema import Job, Switch
from checkmate.wire.tag import CHANNELS_MAX, SHARDS_MAX

TARGETS: Final = get_args(get_type_hints(Switch)["target"])
COLLECTIVES: Final = get_args(Collective)
COPIES: Final = get_args(get_type_hints(Job)["copies"])


def _targets() -> list[str]:
    return list(TARGETS)


def _collectives() -> list[str]:
    return list(COLLECTIVES)


@show_errors
def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The job file to write, such as gpt.yaml.")],
    copies: Annotated[
        str,
        typer.Option(
            "--copies",
            help="What copies gradients to shadow nodes: switch, or host for copies by the ranks themselves.",
            autocompletion=lambda: list(COPIES),
        ),
    ] = "switch",
    job: Annotated[
        str | None, typer.Option("--job", help="Name of the job.", show_default="that of the file")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            help="Number of ranks' hosts, or their names: gpu0,gpu1. With --copies host: of ranks.",
            metavar="HOSTS",
        ),
    ] = "2",
    rank_mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            help="With --copies host, instead of --ranks: such as dp_replicate=2,dp_shard=8.",
            metavar="SIZES",
            show_default="none",
        ),
    ] = "",
    gpus_per_host: Annotated[
        int,
        typer.Option(
            "--gpus-per-host",
            min=1,
            max=GPUS_MOST,
            help="Ranks on each of the hosts in --ranks, which share a replica of a sharded model.",
        ),
    ] = 1,
    shadow_nodes: Annotated[
        str, typer.Option("--shadow-nodes", help="Number of shadow nodes, or their hosts.", metavar="HOSTS")
    ] = "1",
    nics: Annotated[int, typer.Option("--nics", min=1, max=2, help="NICs of a shadow node.")] = 1,
    collective: Annotated[
        str,
        typer.Option(
            "--collective",
            help=f"What reduces gradients: {' or '.join(COLLECTIVES)}.",
            autocompletion=_collectives,
        ),
    ] = "ring",
    channels: Annotated[
        int, typer.Option("--channels", min=1, max=CHANNELS_MAX, help="Channels of the ring.")
    ] = 1,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=SHARDS_MAX, help="Shadow nodes that hold each shard.")
    ] = 1,
    target: Annotated[
        str, typer.Option("--target", help=f"Kind of switch: {', '.join(TARGETS)}.", autocompletion=_targets)
    ] = "softswitch",
    switch: Annotated[
        str, typer.Option("--switch", help="Address of its P4Runtime server.", metavar="HOST:PORT")
    ] = "127.0.0.1:9559",
    network: Annotated[
        str, typer.Option("--network", help="The training network, /16 or larger.", metavar="NETWORK")
    ] = "10.0.0.0/16",
    keys: Annotated[str, typer.Option("--keys", help="Folder of the job's keys.", metavar="PATH")] = "keys",
) -> None:
    """Write a commented job file that is valid, with addresses that you replace by your own.

    With --copies host it needs no switch: ranks send copies themselves, over any network. On a terminal, it
    asks for most of what the options do not specify. Also writes a JSON Schema beside the
    file, which the file names, so that editors complete keys and mark faults. Overwrites nothing.

    Example: checkmate init gpt.yaml --ranks gpu0,gpu1 --shadow-nodes cpu0 --nics 2

    Example: checkmate init gpt.yaml --copies host --ranks 16 --shadow-nodes cpu0,cpu1
    """
    _check_place(file)
    answers = {**context.params, "job": job or file.stem}
    answers["mesh"] = answers.pop("rank_mesh")
    at_terminal = sys.stdin.isatty() and out.is_terminal
    if at_terminal and not _is_given(context, "copies"):
        answers["copies"] = typer.prompt(
            "copies of gradients by (switch, or host for the ranks themselves)",
            default=copies,
            value_proc=_copies_answer,
        )
    answers["copies"] = _copies(answers["copies"])
    _check_options(context, answers["copies"])
    if rank_mesh and not _is_given(context, "ranks"):
        answers["ranks"] = ""
    if at_terminal:
        answers = _ask(context, answers)
    text = _text(answers, file.name)
    files = {file: text}
    beside = file.with_name(starter.SCHEMA_FILE)
    if not beside.exists():
        files[beside] = f"{json.dumps(editor_schema.of_job(), indent=1)}\n"
    _write(files)
    out.print(f"wrote {' and '.join(map(str, files))}", markup=False, soft_wrap=True)
    places = "addresses" if answers["copies"] == "host" else "addresses and ports"
    next_words = f"replace the {places} marked (*) by your own, then:" if "(*)" in text else "next:"
    out.print(next_words, markup=False)
    for command in _WAYS[answers["copies"]].next_commands:
        line = command.format(job=shlex.quote(str(file)))
        out.print(f"  {line}", markup=False, soft_wrap=True)


def _copies(text: str) -> str:
    try:
        _one_of(COPIES)(text)
    except ValueError as error:
        raise UsageFault(f"--copies {error}") from None
    return text


def _copies_answer(text: str) -> str:
    try:
        return str(_one_of(COPIES)(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _check_place(file: Path) -> None:
    """Raise `UsageFault`, before anything is asked, if the file can't be written."""
    if file.suffix not in SUFFIXES:
        raise UsageFault(f"{file} must end in {' or '.join(SUFFIXES)}")
    if file.exists() or file.is_symlink():
        raise UsageFault(f"{file} exists already, and is not overwritten; choose another name, or remove it")
    if not file.parent.is_dir():
        raise UsageFault(f"{file.parent} is not a folder; make it first")


def _network(text: str) -> IPv4Network:
    try:
        network = IPv4Network(text)
    except ValueError:
        network = None
    if network is None or network.prefixlen > 16:
        raise ValueError(f"must be an IPv4 network of /16 or larger, such as 10.0.0.0/16, not {text}")
    return network


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {', '.join(choices[:-1])} or {choices[-1]}, not {text}")
        return text

    return parse


@dataclass(frozen=True)
class _Way:
    """What `init` asks, reads and prints for jobs with one way of copying."""

    start: type[starter.JobStart | starter.HostCopiesStart]
    parsed: Mapping[str, Callable[[str], object]]
    """By parameter, its parser."""
    questions: Mapping[str, str]
    next_commands: Sequence[str]


_NAME, _KEYS = "name of the job", ("checkmate validate {job}", "checkmate keys {job}")
_WAYS: Final = {
    "switch": _Way(
        starter.JobStart,
        {
            "ranks": lambda text: starter.hosts(text, "trainer", least=2),
            "shadow_nodes": lambda text: starter.hosts(text, "shadow"),
            "collective": _one_of(COLLECTIVES),
            "target": _one_of(TARGETS),
            "network": _network,
        },
        {
            "job": _NAME,
            "ranks": "hosts of ranks (their number, or names on the management network with commas)",
            "gpus_per_host": "ranks on each of them",
            "shadow_nodes": "shadow nodes (their number, or hosts)",
            "nics": "NICs of a shadow node (1 or 2)",
            "channels": f"channels of the ring (1 to {CHANNELS_MAX})",
            "target": f"kind of switch ({', '.join(TARGETS)})",
            "switch": "address of its P4Runtime server (host:port)",
        },
        _KEYS,
    ),
    "host": _Way(
        starter.HostCopiesStart,
        {
            "ranks": starter.number_of_ranks,
            "mesh": starter.rank_mesh,
            "shadow_nodes": starter.node_addresses,
        },
        {
            "job": _NAME,
            "ranks": "ranks, on all hosts together",
            "shadow_nodes": "shadow nodes (their number, or hosts)",
            "replicas": "shadow nodes that hold each shard",
        },
        (
            *_KEYS,
            "checkmate shadow {job} --id 0   # on each shadow node, with its id",
            "CHECKMATE_JOB={job} torchrun ... train.py",
        ),
    ),
}


def _check_options(context: typer.Context, copies: str) -> None:
    """Raise `UsageFault` if an option is for the other way of copying."""
    effective = {"file", "copies", *_WAYS[copies].start.__dataclass_fields__}
    for parameter in context.command.params:
        name = "mesh" if parameter.name == "rank_mesh" else str(parameter.name)
        if name not in effective and _is_given(context, str(parameter.name)):
            raise UsageFault(f"{parameter.opts[0]} has no effect with --copies {copies}: leave it out")


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _ask(context: typer.Context, answers: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with the answers to those that are not on the command line."""
    result = dict(answers)
    for name, question in _WAYS[answers["copies"]].questions.items():
        if not _is_given(context, name) and answers[name] != "":
            result[name] = typer.prompt(question, default=answers[name], value_proc=_answer(name, result))
    return result


def _answer(name: str, answers: dict[str, Any]) -> Callable[[str], object]:
    """Return a parser of an answer. The question is asked again if no valid job can have the answer."""

    def parse(text: str) -> object:
        try:
            _WAYS[answers["copies"]].parsed.get(name, str)(text)
            answer: object = int(text) if isinstance(answers[name], int) else text
            _text({**answers, name: answer}, "job.yaml")
        except UsageFault as error:
            raise typer.BadParameter(str(error)) from None
        except ValueError as error:
            number = isinstance(answers[name], int)
            raise typer.BadParameter("must be a whole number" if number else str(error)) from None
        return answer

    return parse


def _start(answers: dict[str, Any]) -> starter.JobStart | starter.HostCopiesStart:
    """Return the job that options and answers describe. Raise `UsageFault` if one is wrong."""
    values, way = dict(answers), _WAYS[answers["copies"]]
    for name, parse in way.parsed.items():
        try:
            values[name] = parse(answers[name])
        except ValueError as error:
            raise UsageFault(f"--{name.replace('_', '-')} {error}") from None
    return way.start(**{name: values[name] for name in way.start.__dataclass_fields__})


def _text(answers: dict[str, Any], name: str) -> str:
    """Return the job file that options and answers describe. Raise `UsageFault` if it has a fault."""
    try:
        text = starter.text(_start(answers), shlex.quote(name))
    except ValueError as error:
        raise UsageFault(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, "utf-8")
        try:
            read_job(file)
        except JobError as error:
            faults = [f"{fault.path}: {fault.message}" for fault in error.faults]
            more = f"; and {counted(len(faults) - _FAULTS, 'more fault')}" if len(faults) > _FAULTS else ""
            hint = "; --job names the job" if any(fault.path == "job" for fault in error.faults) else ""
            fault_text = "; ".join(faults[:_FAULTS])
            raise UsageFault(f"that is not a valid job: {fault_text}{more}{hint}") from None
    return text


_FAULTS: Final = 3


def _write(files: Mapping[Path, str]) -> None:
    """Write files that do not exist, or none of them."""
    with ExitStack() as undo:
        for file, text in files.items():
            try:
                with file.open("x", encoding="utf-8") as stream:
                    undo.callback(file.unlink, missing_ok=True)
                    stream.write(text)
            except OSError as error:
                raise UsageFault(f"{file} cannot be written: {error.strerror}") from None
        undo.pop_all()
