"""`checkmate shadow`: run one shadow node of a job."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Annotated

import typer

import checkmate
from checkmate.base.privileges import Capability, keep_only, to_listen, to_read
from checkmate.base.systemd import notify
from checkmate.cli.common import (
    AsLog,
    Events,
    Insecure,
    JobArgument,
    LogFormat,
    Metrics,
    UsageFault,
    check_node,
    err,
    event_log_capabilities,
    log_to_stderr,
    metrics_ports,
    open_event_log,
    out,
    print_json,
    show_errors,
    view_console,
)
from checkmate.doctor import subjects
from checkmate.doctor.diagnosis import warn
from checkmate.events.kinds import NODE_ENDED, NODE_STARTED
from checkmate.events.process_log import say
from checkmate.job.addresses import split_address
from checkmate.job.files import read_job
from checkmate.job.schema import Job, ShadowNode
from checkmate.keys.roles import Role, role_folder
from checkmate.output.consoles import spinner


@show_errors
def shadow(
    job: JobArgument,
    node_id: Annotated[
        int | None,
        typer.Option(
            "--id",
            help="Id of the node in the job's shadow_nodes.",
            show_default="the node whose NICs, or host, this machine has",
        ),
    ] = None,
    view: Annotated[
        bool | None,
        typer.Option("--view/--no-view", help="Live view.", show_default="on a terminal"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON each second, without a view.")
    ] = False,
    receive_buffer: Annotated[
        int, typer.Option("--receive-buffer", min=1, max=1023, help="Socket buffer of each stream, in MB.")
    ] = 64,
    grace: Annotated[
        float,
        typer.Option("--grace", min=0.1, help="Seconds until missing bytes of a stream count as lost."),
    ] = 2.0,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads of a step.", show_default="one a core")
    ] = None,
    metrics: Metrics = None,
    events: Events = None,
    log_format: AsLog = LogFormat.TEXT,
    insecure: Insecure = False,
) -> None:
    """Receive reduced gradients, step its shards, and serve the checkpoint.

    Prints "ready" once it serves at its mgmt address; streams are connected when training begins. Needs
    the folder of keys of role shadow, and CAP_NET_ADMIN for its receive buffers, unless hosts copy. Stop it
    with Ctrl-C.

    Example: checkmate shadow jobs/gpt.yaml --id 0
    """
    loaded = read_job(job)
    node_id = _own_id(loaded) if node_id is None else node_id
    _check_id(loaded, node_id)
    live_console = None if as_json else view_console(view, log_format)
    log_to_stderr(log_format)
    keep_only(
        *_node_capabilities(loaded, node_id),
        *to_listen(metrics_ports(metrics)),
        *event_log_capabilities(events),
    )
    warn([subjects.shadow(loaded, node_id)], receive_buffer=receive_buffer << 20, insecure=insecure)
    with spinner(err, "starting") if log_format is LogFormat.TEXT else nullcontext():  # torch takes a second
        from checkmate.shadow.process import Serving  # noqa: PLC0415
        from checkmate.shadow.view import follow, time_now  # noqa: PLC0415

    with (
        stopping() as stopped,
        open_event_log(f"shadow node {node_id}", loaded.job, events) as log,
        Serving(
            loaded,
            node_id,
            receive_buffer=receive_buffer << 20,
            grace=grace,
            threads=threads,
            insecure=insecure,
            metrics=metrics,
            events=log,
            file=job,
        ) as serving,
    ):
        log.beat = serving.reached
        event = NODE_STARTED(version=checkmate.__version__, shards=len(serving.node.plans))
        say(logging.DEBUG, event, "shadow node %d serves", node_id)
        if as_json:
            ready = {"time": time_now(), "ready": True, "job": loaded.job, "node": node_id}
            print_json(ready, line=True)
        else:
            out.print(f"ready: shadow node {node_id} of job {loaded.job}; stop with Ctrl-C", soft_wrap=True)
            sys.stdout.flush()
        notify("READY=1", f"STATUS=shadow node {node_id} of job {loaded.job}")
        follow(serving.node, stopped, live_console, as_json=as_json)
        notify("STOPPING=1")
        say(logging.DEBUG, NODE_ENDED(), "shadow node %d was stopped", node_id)


def _node_capabilities(job: Job, node_id: int) -> tuple[Capability, ...]:
    """Return the capabilities of a node: receive buffers are set for each stream that it connects."""
    node = job.node(node_id)
    keys = [] if job.keys is None else [role_folder(job.keys, job.job, Role.SHADOW)]
    ports = tuple(port for _, port in node.addresses)
    buffers = (Capability.NET_ADMIN,) if job.copies == "switch" else ()
    return (*buffers, *to_read(keys), *to_listen(ports))


def _check_id(job: Job, node_id: int) -> None:
    check_node(job, node_id)
    held_nodes = {i for group in range(len(job.dp_groups)) for i in job.shadow_list(group)}
    if node_id not in held_nodes:
        raise UsageFault(f"no DP group has shadow node {node_id} in its shadow_nodes: it would hold nothing")


def _own_id(job: Job) -> int:
    """Return the id of the node whose addresses are this machine's, if there is exactly one."""
    own_nodes = [node.id for node in job.shadow_nodes if all(map(_is_own, _addresses(node)))]
    if len(own_nodes) == 1:
        return own_nodes[0]
    things = "addresses" if job.copies == "host" else "NICs"
    if own_nodes:
        raise UsageFault(
            f"this machine has the {things} of shadow nodes {', '.join(map(str, own_nodes))}: use --id"
        )
    addresses = (f"{node.id}: {' and '.join(_addresses(node))}" for node in job.shadow_nodes)
    fault = f"this machine has the {things} of no shadow node of job {job.job}"
    raise UsageFault(f"{fault}; their addresses are {'; '.join(addresses)}")


def _addresses(node: ShadowNode) -> list[str]:
    """Return the addresses of a node's NICs; with copies by hosts, the host of `mgmt`, maybe a name."""
    return [str(nic.ip) for nic in node.nics] or [split_address(node.mgmt)[0]]


def _is_own(host: str) -> bool:
    """Return whether an address, or a name's, is this machine's. Starts no thread, unlike the doctor's."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                return True
    return False


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets, so that the node ends cleanly with exit status 0."""
    stopped = threading.Event()
    reading, writing = os.pipe2(os.O_CLOEXEC)

    def wait() -> None:
        os.read(reading, 1)
        stopped.set()

    def note(*_: object) -> None:
        # Another thread sets the event: this one may have the event's lock, as it waits, when a signal comes.
        with suppress(BlockingIOError):  # there were many signals
            os.write(writing, b"\0")

    os.set_blocking(writing, False)
    waiting = threading.Thread(target=wait, name="signals", daemon=True)
    waiting.start()
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        note()
        waiting.join()
        os.close(reading)
        os.close(writing)
