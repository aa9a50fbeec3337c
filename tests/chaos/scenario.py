"""Scenarios and their JSON. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from checkmate.job.mesh_groups import serving

FEATURES: Final[Mapping[str, str]] = {
    "memory-format": "channels_last, channels_last_3d and transposed parameters",
    "scalar": "a 0-dim parameter",
    "wide": "an fp64 parameter",
    "half": "bf16 parameters",
    "float16": "float16 parameters",
    "empty": "a parameter without elements",
    "tied": "a weight that two layers share",
    "frozen": "a frozen parameter, of which the optimizer has state",
    "unused": "a parameter that never has a gradient",
    "sometimes": "a layer that some iterations leave out",
    "norm": "BatchNorm",
    "embedding": "an embedding",
    "dropout": "dropout",
    "buffer": "a buffer that every forward changes",
    "groups": "two parameter groups",
    "schedule": "a learning-rate scheduler",
    "compound": "a scheduler that consists of others, or one that follows the loss",
    "loader": "a StatefulDataLoader that shuffles, with its state in extra()",
    "clip": "clipping",
    "scaler": "a GradScaler, with overflows",
    "accumulate": "two or three micro-batches",
    "autocast": "autocast to bf16",
    "ema": "an EMA in extra(), updated after the step",
    "validation": "random numbers drawn after the step",
    "low-precision": "bf16 compute of a sharded model, with gradients in fp32 or bf16",
    "fast": "iterations without a pause",
    "shards": "FSDP2 with replicas, in two or three shards, which are the ranks of a host",
    "together": "these ranks train one model under DDP instead, each a share of it",
    "by-hosts": "hosts that copy gradients themselves, without a switch and a controller",
    "in-place": "recovery in place: `checkmate launch` starts a dead rank alone",
    "spares": "recovery in place with a warm spare on each host",
    "keeping": "recovery in place by survivors that keep parameters and optimizer state",
    "switches": "two or three switches",
    "channels": "two channels",
    "replicas": "two holders of each shard",
    "packet-loss": "training links that lose frames",
    "copy-loss": "frames that are lost between switches and shadow nodes, which ranks send again",
    "trees": "buckets that go over a double binary tree, with three ranks or more",
    "disk": "consolidate --every beside training",
    "rank-kills": "kill -9 of a rank",
    "double-kills": "kill -9 of another rank while the job starts again",
    "terminations": "SIGTERM to a rank",
    "errors": "a script that raises",
    "closes": "clean stops",
    "recovery-kills": "kill -9 of a rank and, while that is recovered from in place, of others or the same",
    "host-kills": "kill -9 of all ranks of a host with their launcher, which is started again",
    "spare-kills": "kill -9 of a warm spare, alone or with a rank",
    "stalls": "SIGSTOP and SIGCONT of a shadow node, a rank or a switch",
    "stalled-kills": "kill -9 of a rank while a shadow node is stopped",
    "shadow-kills": "kill -9 of a shadow node, which comes back",
    "lost-shards": "kill -9 of a shadow node and of a rank at once: what is left is on disk, if anywhere",
    "switch-kills": "kill -9 of a switch, which comes back",
    "controller-kills": "kill -9 of the controller, which comes back",
    "links": "an interface that goes down and comes back",
}
"""Features of scenarios, by their name for `--without`."""


@dataclass(frozen=True)
class ModelSpec:
    """The model. `parts` are names in FEATURES of parts of the model; `turned` is for `OddShapes`.

    `precision` is that of a sharded model: fp32, bf16 (compute), or bf16-gradients (both).
    """

    parts: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    width: int = 24
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    schedule: str = "none"
    clip: float = 0.0
    clip_norm: float = 2.0
    accumulate: int = 1
    infinite: tuple[int, ...] = ()
    precision: str = "fp32"
    boundary: str = "steps"
    bucket_mb: float = 0.01
    iterations: int = 40
    pause: float = 0.03

    def has(self, part: str) -> bool:
        """Return whether it has this feature."""
        return part in self.parts


@dataclass(frozen=True)
class NetworkSpec:
    """The network. `nodes` has the number of each shadow node's NICs.

    `loss` is for training links, `copy_loss` for those to shadow nodes.

    A ring has `ranks` ranks. With several `shards`, each is a DP group, and a host has a rank of each. The
    model is sharded then; if the groups train one `together` instead, each has a share of it.

    `recovery` is a "restart" of all ranks, "in-place", or in place with a warm "spare" on each host.
    With `copies` by hosts, `switches` is 0. A sharded model may have one replica (`ranks`) then, whose ranks
    have a host each, and ranks that train `together` are one DP group.
    """

    ranks: int = 2
    shards: int = 1
    switches: int = 1
    channels: int = 1
    nodes: tuple[int, ...] = (1,)
    replicas: int = 1
    loss: float = 0.0
    every: int = 0
    together: bool = False
    copies: str = "switch"
    recovery: str = "restart"
    keeping: bool = False
    copy_loss: float = 0.0
    trees: bool = False

    @property
    def in_place(self) -> bool:
        """Whether survivors keep their processes."""
        return self.recovery != "restart"

    @property
    def groups(self) -> int:
        """The number of DP groups."""
        return 1 if self.copies == "host" and self.together else self.shards

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model."""
        return self.shards > 1 and not self.together

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.ranks * self.shards

    def topology(self) -> dict[str, Any]:
        """Return the data of its lab's YAML: hosts and shadow nodes are attached to the switches in turn."""
        if self.copies == "host":
            return self._topology_without_switches()
        names = [f"tor{number}" for number in range(self.switches)]
        attached = [names[rank % self.switches] for rank in range(self.ranks)]
        ranks: dict[str, Any] = {"dp_groups": [{"ranks": attached}]}
        if self.shards > 1:
            mesh = {"dp_replicate": self.ranks, "dp_shard": self.shards}
            if self.together:
                mesh = {"dp_replicate": self.world}
            hosts = [[switch] for switch in attached]
            ranks = {"hosts": hosts, "mesh": mesh, "gpus_per_host": self.shards}
        return {
            "title": f"rings of {self.ranks} on {self.switches} switches",
            "channels": self.channels,
            "replicas": self.replicas,
            "switches": names,
            "links": [[a, b] for a, b in itertools.pairwise(names)],
            "lossless": not self.copy_loss,
            **({"collective": "tree", "tree_bytes": 20_000} if self.trees else {}),
            **ranks,
            "shadow_nodes": [[names[node % self.switches]] * count for node, count in enumerate(self.nodes)],
        }

    @property
    def by_host(self) -> tuple[int, int]:
        """The number of hosts, and that of each host's ranks."""
        one_each = self.copies == "host" and self.ranks == 1
        return (self.world, 1) if one_each else (self.ranks, self.shards)

    def _topology_without_switches(self) -> dict[str, Any]:
        hosts, ranks_of_host = self.by_host
        mesh = {"dp_replicate": self.ranks, "dp_shard": self.shards}
        return {
            "title": f"{self.ranks} x {self.shards} ranks, whose hosts copy gradients",
            "copies": "host",
            "replicas": self.replicas,
            "hosts": hosts,
            "gpus_per_host": ranks_of_host,
            **({"mesh": mesh} if self.sharded else {}),
            "shadow_nodes": len(self.nodes),
        }

    def holders(self) -> list[list[int]]:
        """Return the shadow nodes that hold each shard of each DP group's model."""
        count = len(self.nodes)
        lists = [serving(group, self.groups, count, self.replicas) for group in range(self.groups)]
        return [
            [nodes[(shard + i) % len(nodes)] for i in range(self.replicas)]
            for nodes in lists
            for shard in range(len(nodes))
        ]


@dataclass(frozen=True)
class Event:
    """An event `delay` s after rank 0 has first completed iteration `at`.

    Attributes:
        kind: kill, terminate, error, close, stall, down.
        who: `rank1`, `shadow0`, `tor0`, `ctl`, a rank's `host1` or `spare1`; `job` for a close.
        seconds: Duration of a stall or of a link's failure, or time until a killed process is restarted.
    """

    at: int
    kind: str
    who: str
    delay: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        when = f"{self.at}" + (f" + {self.delay:g} s" if self.delay else "")
        return f"{self.kind} {self.who} at {when}" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass(frozen=True)
class Scenario:
    """A job and its events."""

    seed: int
    model: ModelSpec = ModelSpec()
    network: NetworkSpec = NetworkSpec()
    events: tuple[Event, ...] = ()

    def to_json(self) -> str:
        """Return JSON for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Return the scenario that `to_json` wrote."""
        document = json.loads(text)
        model, network = document["model"], document["network"]
        for name in ("parts", "turned", "infinite"):
            model[name] = tuple(model[name])
        if "betas" in model["options"]:
            model["options"]["betas"] = tuple(model["options"]["betas"])
        network["nodes"] = tuple(network["nodes"])
        events = tuple(Event(**event) for event in document["events"])
        return cls(document["seed"], ModelSpec(**model), NetworkSpec(**network), events)
