"""The kinds of events: their names and fields are stable. docs/operating.md has this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

FIELDS: Final[Mapping[str, str]] = {
    "added": "names of jobs",
    "completed": "whether training was complete",
    "count": "how many",
    "from": "`nodes`, `disk`, or `start` if training begins with iteration 0",
    "generation": "the number of the run",
    "group": "the DP group",
    "how": "`closed` by the node, or `reset`",
    "incarnation": "the number of the start of training, 0 to 255",
    "iteration": (
        "the last one; of `training.begun`, `trainer.restore.ended` and `trainer.protect.ended` the next; of "
        "`trainer.ring.broken` and `training.refused` the one that was trained"
    ),
    "iterations": "how many",
    "jobs": "names of jobs",
    "joins": "the iteration from which on it receives everything again",
    "kind": "`nodes`, `none`, `nothing`, `reset` or `refused`: what the shadow nodes have",
    "nics": "addresses",
    "node": "id of a shadow node",
    "nodes": "ids of shadow nodes",
    "rank": "its name",
    "removed": "names of jobs",
    "seconds": "how long that took",
    "shard": "the shard of the DP group",
    "shards": "how many",
    "state": "`live`, `joining` or `dropped`",
    "switch": "its name",
    "switches": "their names",
    "updates": "writes to switches",
    "version": "of Checkmate",
    "waiting": "what training did not wait for any longer; empty if all nodes follow",
    "why": "in words; empty if there is nothing to say",
}
"""The meaning of each field."""


class Occurrence(NamedTuple):
    """An occurrence of a kind of event, with its fields."""

    name: str
    fields: Mapping[str, object]


@dataclass(frozen=True)
class Kind:
    """A kind of event. Called with a value for each of its fields, it makes an event."""

    name: str
    meaning: str
    fields: tuple[str, ...]

    def __call__(self, **fields: object) -> Occurrence:
        """Return an event. A field that is a word of Python has an underscore behind it."""
        values = {name.rstrip("_"): value for name, value in fields.items()}
        if values.keys() != set(self.fields):
            raise TypeError(f"{self.name} has the fields {self.fields}, not {tuple(values)}")
        return Occurrence(self.name, values)


KINDS: Final[dict[str, Kind]] = {}
"""All kinds, by name."""


def _kind(name: str, meaning: str, *fields: str) -> Kind:
    KINDS[name] = kind = Kind(name, meaning, fields)
    return kind


NODE_STARTED: Final = _kind("node.started", "a shadow node serves", "version", "shards")
NODE_ENDED: Final = _kind("node.ended", "it was stopped")
NODE_STALLED: Final = _kind("node.stalled", "it did not run for a while, and continues", "seconds")
NODE_TROUBLE: Final = _kind("node.trouble", "a problem of the node itself", "why")
NODE_FENCED: Final = _kind(
    "node.fenced", "a restart has stopped its commits", "incarnation", "iteration", "why"
)
RANKS_CHANGED: Final = _kind(
    "ranks.changed", "training restarts with other ranks: of another job file, or with fewer or more replicas"
)
RANKS_WHOLE: Final = _kind(
    "ranks.whole", "the job has all shards again: the state of its former ranks is dropped"
)
NODE_RESET: Final = _kind("node.reset", "`checkmate reset` has discarded what it held", "generation")
NODE_DRAINED: Final = _kind("node.drained", "`checkmate drain`: it holds nothing until it is restarted")
TRAINING_BEGUN: Final = _kind("training.begun", "a DP group starts", "group", "incarnation", "iteration")
TRAINING_REFUSED: Final = _kind(
    "training.refused",
    "a rank's script did what shadow nodes can't repeat, and ends; the first rank that a node hears of",
    *("incarnation", "iteration", "rank", "why"),
)
TRAINING_OVERLAPS: Final = _kind(
    "training.overlaps", "an older start of training goes on beside the present one", "why"
)
ITERATION_COMMITTED: Final = _kind(
    "iteration.committed",
    "how far it is: beside other events, and each 30 s; only in the event log",
    *("incarnation", "iteration"),
)
HOLD_CHANGED: Final = _kind(
    "hold.changed", "a shard on this node is in another state", "group", "shard", "state", "iteration", "why"
)
HOLD_BEHIND: Final = _kind(
    "hold.behind",
    "a shard on this node is behind the trainers: once a minute",
    *("group", "shard", "iteration", "why"),
)
SHARD_SEEDED: Final = _kind(
    "shard.seeded", "all parameters of a shard have arrived", "group", "shard", "iteration"
)
STREAM_CONNECTED: Final = _kind("stream.connected", "streams of a shadow node are connected", "count")
STREAM_BROKEN: Final = _kind("stream.broken", "they have broken, and connect again", "count", "why")
STREAM_FAILED: Final = _kind("stream.failed", "they could not connect, and try again", "count", "why")
STREAM_GAP: Final = _kind(
    "stream.gap", "gradients were lost; the shard joins again", "group", "shard", "iteration", "joins", "why"
)
COMPARISON_MISMATCH: Final = _kind(
    "comparison.mismatch",
    "a shard differs from the trainers': the first, 10th, 100th time in a row, and so on",
    *("group", "shard", "iteration", "why"),
)
PEER_LOST: Final = _kind("peer.lost", "the process of another shadow node has ended", "node", "why")
PEER_BEHIND: Final = _kind("peer.behind", "the others continued without a shadow node", "node", "iterations")
PEER_BACK: Final = _kind("peer.back", "that node answers, or has caught up", "node")

CONTROLLER_STARTED: Final = _kind("controller.started", "a controller begins", "version", "jobs")
CONTROLLER_STANDBY: Final = _kind("controller.standby", "it waits, because another one serves")
CONTROLLER_CLAIMS: Final = _kind("controller.claims", "a switch has no primary: it takes over", "switch")
CONTROLLER_PRIMARY: Final = _kind(
    "controller.primary", "it has written what was missing, and serves", "switches", "updates", "seconds"
)
CONTROLLER_DISPLACED: Final = _kind(
    "controller.displaced", "it does not serve, or does not any longer", "why"
)
CONTROLLER_ENDED: Final = _kind("controller.ended", "it was stopped")
SWITCH_LOST: Final = _kind("switch.lost", "a switch does not answer", "switch", "why")
SWITCH_BACK: Final = _kind("switch.back", "it answers again", "switch", "updates")
STREAM_ADMITTED: Final = _kind(
    "stream.admitted", "a switch copies to streams from now on", "switch", "count", "nics"
)
STREAM_REFUSED: Final = _kind(
    "stream.refused",
    "hellos or SYNs were refused: at most once a minute, the newest with the count since the last such event",
    *("switch", "count", "why"),
)
STREAM_CLOSED: Final = _kind(
    "stream.closed", "a switch does not copy to streams any longer", "switch", "how", "count", "nics"
)
JOBS_CHANGED: Final = _kind("jobs.changed", "job files have changed", "added", "removed", "updates")
JOBS_REFUSED: Final = _kind("jobs.refused", "they could not be applied", "why")

RESTORE_STARTED: Final = _kind("trainer.restore.started", "a rank has called `restore`")
RESTORE_DRAINED: Final = _kind(
    "trainer.restore.drained", "these nodes have stepped what had been sent", "nodes", "seconds"
)
RESTORE_AGREED: Final = _kind(
    "trainer.restore.agreed",
    "all ranks know what to resume from",
    *("kind", "iteration", "incarnation", "generation", "seconds", "why"),
)
RESTORE_FETCHED: Final = _kind(
    "trainer.restore.fetched",
    "a rank has its state, from shadow nodes and from other ranks",
    "iteration",
    "seconds",
)
RESTORE_INSTALLED: Final = _kind("trainer.restore.installed", "it is in place", "iteration", "seconds")
RESTORE_ENDED: Final = _kind("trainer.restore.ended", "`restore` returns", "from", "iteration", "seconds")
RESTORE_FAILED: Final = _kind("trainer.restore.failed", "it raises an error", "why", "seconds")
PROTECT_STARTED: Final = _kind("trainer.protect.started", "a rank has called `protect`")
PROTECT_ENDED: Final = _kind(
    "trainer.protect.ended",
    "`protect` returns",
    *("iteration", "incarnation", "waiting", "seconds"),
)
TRAINER_FIRST: Final = _kind(
    "trainer.first", "after `protect`, the first iteration is done", "iteration", "seconds"
)
TRAINER_NODE_LOST: Final = _kind("trainer.node.lost", "training goes on without a shadow node", "node", "why")
TRAINER_NODE_TROUBLE: Final = _kind(
    "trainer.node.trouble",
    "what a shadow node reports; of changes in a row as `comparison.mismatch`",
    *("node", "why"),
)
TRAINER_NODE_BACK: Final = _kind("trainer.node.back", "that node answers again", "node")
TRAINER_SUPERSEDED: Final = _kind(
    "trainer.superseded", "shadow nodes follow another start of the job, and not this one any more", "why"
)
TRAINER_OVERLAPS: Final = _kind(
    "trainer.overlaps", "shadow nodes follow this start, and an older one of the job goes on", "why"
)
TRAINER_RING_BROKEN: Final = _kind("trainer.ring.broken", "gradients can't be reduced", "iteration", "why")
TRAINER_RANK_LOST: Final = _kind(
    "trainer.rank.lost",
    "a shadow node says that another rank is lost; this one goes on in its process",
    *("rank", "why"),
)
TRAINER_ENDED: Final = _kind(
    "trainer.ended", "a rank's protection has ended", "iteration", "completed", "why"
)

EVENTS_LOST: Final = _kind("events.lost", "the log on disk lacks events from before this one", "count")
