"""`checkmate init`: write a commented job file from a few questions or options."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from checkmate.job.schema import Switch
from checkmate.wire.tag import CHANNELS_MAX, SHARDS_MAX

TARGETS: Final = get_args(get_type_hints(Switch)["target"])
COLLECTIVES: Final = get_args(Collective)


def _targets() -> list[str]:
    return list(TARGETS)


def _collectives() -> list[str]:
    return list(COLLECTIVES)


@show_errors
def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The job file to write, such as gpt.yaml.")],
    job: Annotated[
        str | None, typer.Option("--job", help="Name of the job.", show_default="that of the file")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option("--ranks", help="Number of ranks' hosts, or their names: gpu0,gpu1.", metavar="HOSTS"),
    ] = "2",
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

    On a terminal, it asks for most of what the options do not specify. Also writes a JSON Schema beside the
    file, which the file names, so that editors complete keys and mark faults. Overwrites nothing.

    Example: checkmate init gpt.yaml --ranks gpu0,gpu1 --shadow-nodes cpu0 --nics 2
    """
    _check_place(file)
    answers = {**context.params, "job": job or file.stem}
    if sys.stdin.isatty() and out.is_terminal:
        answers = _ask(context, answers)
    text = _text(answers, file.name)
    files = {file: text}
    beside = file.with_name(starter.SCHEMA_FILE)
    if not beside.exists():
        files[beside] = f"{json.dumps(editor_schema.of_job(), indent=1)}\n"
    _write(files)
    out.print(f"wrote {' and '.join(map(str, files))}", markup=False, soft_wrap=True)
    out.print("replace the addresses and ports marked (*) by your own, then:", markup=False)
    for command in ("validate", "keys"):
        out.print(f"  checkmate {command} {shlex.quote(str(file))}", markup=False, soft_wrap=True)


def _check_place(file: Path) -> None:
    """Raise `UsageFault`, before anything is asked, if the file can't be written."""
    if file.suffix not in SUFFIXES:
        raise UsageFault(f"{file} must end in {' or '.join(SUFFIXES)}")
    if file.exists() or file.is_symlink():
        raise UsageFault(f"{file} exists already, and is not overwritten; choose another name, or remove it")
    if not file.parent.is_dir():
        raise UsageFault(f"{file.parent} is not a folder; make it first")


def _start(answers: dict[str, Any]) -> starter.JobStart:
    """Return the job that options and answers describe. Raise `UsageFault` if one is wrong."""
    values = dict(answers)
    for name, parse in _PARSED.items():
        try:
            values[name] = parse(answers[name])
        except ValueError as error:
            raise UsageFault(f"--{name.replace('_', '-')} {error}") from None
    return starter.JobStart(**{name: values[name] for name in starter.JobStart.__dataclass_fields__})


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


_PARSED: Final[dict[str, Callable[[str], object]]] = {
    "ranks": lambda text: starter.hosts(text, "trainer", least=2),
    "shadow_nodes": lambda text: starter.hosts(text, "shadow"),
    "collective": _one_of(COLLECTIVES),
    "target": _one_of(TARGETS),
    "network": _network,
}
_QUESTIONS: Final = {
    "job": "name of the job",
    "ranks": "hosts of ranks (their number, or names on the management network with commas)",
    "gpus_per_host": "ranks on each of them",
    "shadow_nodes": "shadow nodes (their number, or hosts)",
    "nics": "NICs of a shadow node (1 or 2)",
    "channels": f"channels of the ring (1 to {CHANNELS_MAX})",
    "target": f"kind of switch ({', '.join(TARGETS)})",
    "switch": "address of its P4Runtime server (host:port)",
}


def _ask(context: typer.Context, answers: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with the answers to those that are not on the command line."""
    result = dict(answers)
    for name, question in _QUESTIONS.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            result[name] = typer.prompt(question, default=answers[name], value_proc=_answer(name, result))
    return result


def _answer(name: str, answers: dict[str, Any]) -> Callable[[str], object]:
    """Return a parser of an answer. The question is asked again if no valid job can have the answer."""

    def parse(text: str) -> object:
        try:
            _PARSED.get(name, str)(text)
            answer: object = int(text) if isinstance(answers[name], int) else text
            _text({**answers, name: answer}, "job.yaml")
        except UsageFault as error:
            raise typer.BadParameter(str(error)) from None
        except ValueError as error:
            number = isinstance(answers[name], int)
            raise typer.BadParameter("must be a whole number" if number else str(error)) from None
        return answer

    return parse


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
