"""`checkmate drain`: take a shadow node out of its job, without losing the checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from checkmate.base.privileges import keep_only, to_read
from checkmate.cli.common import (
    AsJson,
    Insecure,
    JobArgument,
    check_node,
    err,
    out,
    print_json,
    show_errors,
)
from checkmate.job.files import read_job
from checkmate.keys.access import access
from checkmate.keys.roles import Role, role_folder
from checkmate.nodes import draining
from checkmate.nodes.standing import name
from checkmate.nodes.stubs import Stubs
from checkmate.output.consoles import spinner_or_line


@show_errors
def drain(
    job: JobArgument,
    node_id: Annotated[int, typer.Option("--id", help="Id of the node in the job's shadow_nodes.")],
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.0, help="Seconds to wait until other nodes hold its shards."),
    ] = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also if no other node holds its shards, whose state is lost.")
    ] = False,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Have a shadow node leave its job, if other live nodes hold all of its shards.

    It then holds nothing, and joins again once its process is restarted. Training and the other nodes go on.
    From any host that reaches the shadow nodes and has the folder of keys of role trainer.

    Exit status: 1 if no other node holds a shard, or training restarts: the node goes on as before; 2 bad
    input; 3 if the node does not answer.

    Example: checkmate drain jobs/gpt.yaml --id 0 && ssh shadow0 systemctl restart checkmate-shadow@0
    """
    loaded = read_job(job)
    check_node(loaded, node_id)
    keep_only(*to_read([] if loaded.keys is None else [role_folder(loaded.keys, loaded.job, Role.TRAINER)]))
    reasons = set[str]()

    def waits(why: str) -> None:
        if why not in reasons:
            err.print(f"waiting: {why}", soft_wrap=True, markup=False, highlight=False)
            reasons.add(why)

    keys = access(loaded, Role.TRAINER, insecure=insecure).keys
    with Stubs(loaded, keys) as stubs, spinner_or_line(err, "draining"):
        shards = draining.drain(loaded, stubs, node_id, timeout, force=force, waits=waits)
    if as_json:
        shard_data = [{"group": group, "shard": shard} for group, shard in shards]
        print_json({"job": loaded.job, "node": node_id, "held": shard_data, "forced": force})
        return
    shard_names = ", ".join(name(shard) for shard in shards) or "nothing"
    out.print(
        f"Shadow node {node_id} of job {loaded.job} is drained; it held {shard_names}. "
        "It joins again once its process is restarted.",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
