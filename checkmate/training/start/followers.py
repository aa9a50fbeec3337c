"""One rank's side of the group's shadow nodes: its messages to them, and a line and a seeder for each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from checkmate import state
from checkmate.base.wording import at_iteration, counted, shortened
from checkmate.events.kinds import TRAINER_NODE_TROUBLE, TRAINER_OVERLAPS, TRAINER_SUPERSEDED
from checkmate.events.process_log import say
from checkmate.job.mesh import group_name
from checkmate.nodes.other_ranks import job_ranks
from checkmate.nodes.standing import node_name, overlap_words
from checkmate.nodes.stubs import UNREACHABLE, Stubs, reason
from checkmate.output.log_lines import Repetition, left_out_words
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL, REFUSAL_MAX, TEXT_MAX
from checkmate.training.lines.line import Line
from checkmate.training.lines.seeder import Seeder, SeedSource
from checkmate.training.record.buffers import FIRST_BYTES, Buffers
from checkmate.training.record.windows import Slices
from checkmate.training.start import exchange
from checkmate.training.start.places import Place, Start, seeded_by
from checkmate.training.start.plans import FromNodes
from checkmate.wire.layout import Layout

_log: Final = logging.getLogger("checkmate")

AWAY_SECONDS: Final = 3.0
"""Seconds to wait at the end for a node whose connection is broken, because it may come back."""
REFUSED_SECONDS: Final = 2.0
"""Seconds to wait for the shadow nodes to take why the script was refused."""
_SUPERSEDED: Final = (
    "another start of this job has begun%s, and shadow nodes do not follow this one any more: what it trains "
    "from now on is not kept. If torchrun was started a second time while this one ran, end one of the two. "
    "This one is followed again once it is restarted"
)


Repair = Callable[[int, pb.MissingRange, Callable[[pb.RepairedRange], None]], None]
"""Sends again what a node asks for, and then calls a function with what that was."""


@dataclass(frozen=True)
class Opening:
    """Creates a rank's messages to nodes.

    `iteration` returns the last one whose backward has begun. `names` are the model's `state_names`.
    """

    place: Place
    start: Start
    names: Mapping[str, str]
    layout: Layout
    optimizer: pb.OptimizerSpec
    device: str
    buffers: Buffers
    iteration: Callable[[], int]

    def author(self) -> pb.RecordPart:
        """Return the fields that all parts of this rank's step records share."""
        place, plan = self.place, self.start.plan
        return pb.RecordPart(
            job=place.job.job,
            incarnation=plan.incarnation,
            run=plan.run,
            start=plan.start,
            group=place.group,
            position=place.position,
        )

    def begin_request(self) -> pb.BeginRequest:
        """Return the group's first rank's request to a node, at each connect."""
        start = self.start
        return pb.BeginRequest(
            job=self.place.job.job,
            group=self.place.group,
            incarnation=start.plan.incarnation,
            first_iteration=start.next_iteration,
            next_iteration=self.iteration() + 1,
            layout=self.layout.to_json(),
            optimizer=self.optimizer,
            keep=start.keep,
            torch=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            device=self.device,
            ranks=self.place.ranks,
            job_ranks=job_ranks(self.place.job),
            former_groups=start.former_groups,
            run=start.plan.run,
            start=start.plan.start,
            continues=start.plan.continues,
            protocol=PROTOCOL,
            generation=start.plan.generation,
            names=self._names(),
            buffers=sorted(self.buffers.names),
        )

    def seed_header(self, shard: int, iteration: int) -> pb.SeedHeader:
        """Return the header of a stream of seeds, without parameters."""
        start = self.start
        record = start.record if iteration == start.next_iteration - 1 else None
        return pb.SeedHeader(
            job=self.place.job.job,
            incarnation=start.plan.incarnation,
            run=start.plan.run,
            start=start.plan.start,
            shard=pb.Shard(group=self.place.group, shard=shard),
            iteration=iteration,
            record=record,
        )

    def _names(self) -> dict[str, str]:
        """Return the keys of the model's `state_dict()` whose tensors the nodes receive, with their names."""
        names = {parameter.name for parameter in self.layout.parameters} | self.buffers.names
        return {key: name for key, name in self.names.items() if name in names}


class Followers:
    """Lines and seeders of all nodes, which handles the nodes' answers. `bring_up` connects them.

    `close` ends all threads. Queued messages are lost.
    """

    def __init__(
        self,
        opening: Opening,
        stubs: Stubs,
        source: SeedSource,
        slices: Slices | None,
        repair: Repair | None = None,
    ) -> None:
        """Create the lines and seeders.

        Args:
            opening: Creates messages.
            stubs: To all nodes.
            source: The values of seeds.
            slices: Told about suspects; `None` on all but the first rank.
            repair: Sends lost copies again; `None` if there are none, or this rank tags nothing.
        """
        self._opening = opening
        self._repair = repair
        self._slices = slices
        self._place = place = opening.place
        self._stubs = stubs
        self._troubles = {node.id: "" for node in place.nodes}
        self._repetitions = {node.id: Repetition() for node in place.nodes}
        self._noted: set[str] = set()
        self._noting = threading.Lock()
        self._finishing = False
        """Whether an answer without trouble may be one without a record, which tells nothing."""
        begin = opening.begin_request if place.first else None
        with ExitStack() as undo:
            self.lines = [
                Line(
                    *(node, stubs.to(node.id), begin, self._replied, self._on_begun),
                    tls=stubs.tls,
                    at_risk=self._at_risk,
                    repairs=None if repair is None else opening.author(),
                )
                for node in place.nodes
            ]
            for line in self.lines:
                undo.callback(line.close)
            self._seeders: dict[int, Seeder] = {}
            for node in place.nodes:
                self._seeders[node.id] = Seeder(node.id, stubs.to(node.id), source, opening.seed_header)
                undo.callback(self._seeders[node.id].close)
            self._undo = undo.pop_all()

    def bring_up(self, deadline: float) -> str:
        """Connect to the nodes, seed them, and wait for both until the deadline. All ranks call it.

        Return in words what is not ready, on the first rank of a DP group.
        """
        place, opening = self._place, self._opening
        for line in self.lines:
            line.start()
        if place.first:
            for line in self.lines:
                line.begin_accepted.wait(max(deadline - time.monotonic(), 0))
        begun = [
            [line.node.id, filled_shards(line.filled, opening.layout)]
            for line in self.lines
            if line.begin_accepted.is_set()
        ]
        begun = exchange.gather(begun if place.first else None, name_of=place.name_of)[place.spokesman]
        filled = {node: {shard: set(numbers) for shard, *numbers in shards} for node, shards in begun}
        seeders = {node: seeder for node, seeder in self._seeders.items() if node in filled}
        seed_at_start(place, opening.layout, opening.start, seeders, filled)
        if place.first:
            give_buffers(place, opening.buffers, opening.start, seeders, deadline)
        waiting = ""
        if place.first:
            waiting = await_ready(place, self._stubs, opening.start.plan.incarnation, deadline)
        exchange.gather(None, name_of=place.name_of)  # nobody trains before all spokesmen have waited
        if waiting:
            _log.warning("training begins without all shadow nodes: %s", waiting)
        elif place.first:
            nodes = ", ".join(str(node.id) for node in place.nodes)
            following = f"shadow nodes {nodes} follow DP group {group_name(place.job, place.group)}"
            _log.info("%s, from iteration %d on", following, opening.start.next_iteration)
        return waiting

    def finish(self, deadline: float) -> None:
        """Wait until the nodes have every record, but not beyond the deadline, and less for nodes away."""
        self._finishing = True
        for line in self.lines:
            line.finish(0)
        away = time.monotonic() + AWAY_SECONDS
        for line in self.lines:
            if line.begin_accepted.is_set():
                until = deadline if line.connected else min(away, deadline)
                line.finish(until - time.monotonic())

    def await_stepped(self, iteration: int, deadline: float) -> None:
        """Wait until the nodes have stepped an iteration.

        If they have not by the deadline, the first rank logs a warning.
        """
        if not self.lines or "superseded" in self._noted:
            return
        opening = self._opening
        incarnation = opening.start.plan.incarnation
        missing = await_stepped(self._place, self._stubs, incarnation, iteration, deadline)
        if missing and self._place.first:
            _log.warning(
                "training ends, but shadow nodes have not stepped iteration %d: %s", iteration, missing
            )

    def report_refusal(self, iteration: int, error: Exception, marks: bool) -> None:
        """Tell the shadow nodes why the script is refused, so that the next start can say it.

        Takes `REFUSED_SECONDS` at most, whatever the nodes do, and never raises. May be called by any thread.

        Args:
            iteration: The one in which it was refused, whose record is not sent.
            error: Its text is told.
            marks: Whether the script marks where its iterations end.
        """
        if not self._place.nodes:
            return
        nodes = [node.id for node in self._place.nodes]
        try:
            request = pb.RefusedRequest(
                job=self._place.job.job,
                protocol=PROTOCOL,
                start=self._opening.start.plan.start,
                iteration=iteration,
                rank=shortened(self._place.name, TEXT_MAX),
                text=shortened(str(error).removeprefix(f"iteration {iteration}: "), REFUSAL_MAX),
                marks=marks,
            )
            replies = self._stubs.ask(nodes, lambda stub: stub.Refused, request, REFUSED_SECONDS)
        except Exception as failure:  # noqa: BLE001 - the script's own error matters
            replies = dict.fromkeys(nodes, reason(failure))
        failures = {node: reply for node, reply in replies.items() if isinstance(reply, str)}
        for node, why in failures.items():
            _log.debug("shadow node %d does not know of the refusal: %s", node, why)
        if len(failures) == len(nodes):
            _log.info("no shadow node knows why training ends, so the next start can't say it")

    def close(self) -> None:
        """End all threads."""
        for line in self.lines:
            line.end()
        self._undo.close()

    def _at_risk(self, lost_node: int) -> str:
        """Return in words which shards no other node has, if a node is lost."""
        connected_nodes = {
            line.node.id for line in self.lines if line.connected and line.node.id != lost_node
        }
        holders = {
            shard: {node.id for node in self._place.holders(shard)} for shard in range(self._place.shards)
        }
        alone = [
            str(shard)
            for shard, nodes in holders.items()
            if lost_node in nodes and not nodes & connected_nodes
        ]
        if not alone:
            return ""
        shards = f"shard{'s' * (len(alone) > 1)} {', '.join(alone)}"
        return f", but no other node has {shards}: a crash now does not resume from shadow nodes"

    def _on_begun(self, request: pb.BeginRequest) -> None:
        """Send buffers again to a node that joined late or came back."""
        if request.next_iteration > request.first_iteration:
            self._opening.buffers.again()

    def _replied(self, node: int, reply: pb.RecordReply) -> None:
        """Handle a node's answer to a record. This rank seeds only its own share of the shards."""
        if reply.missing:
            self._send_again(node, reply.missing)
        if reply.iteration < 0 and not reply.superseded:
            return  # to a question, not to a record
        for request in reply.wanted:
            if request.shard < self._place.shards and (
                shard_numbers := seeded_by(self._place, self._opening.layout, request.shard)
            ):
                numbers = (
                    sorted({*request.parameters}.intersection(shard_numbers))
                    if request.parameters
                    else shard_numbers
                )
                self._seeders[node].want(request.shard, numbers)
        if self._slices is not None and reply.suspects:
            self._slices.look_first(reply.suspects)
        if reply.buffers:
            self._opening.buffers.again()
        if reply.superseded and self._is_new("superseded"):
            self._say_superseded(reply.by)
        if reply.also_training and self._is_new("overlaps"):
            words = overlap_words([shortened(host) for host in reply.also_training])
            say(logging.WARNING, TRAINER_OVERLAPS(why=words), "%s", words)
        is_news = not reply.superseded and (reply.trouble or not self._finishing)
        if is_news and reply.trouble != self._troubles[node]:
            self._troubles[node] = reply.trouble
            self._say_trouble(node, reply)

    def _send_again(self, node: int, ranges: Iterable[pb.MissingRange]) -> None:
        """Have bytes sent again that a node lacks of its own shards."""
        line = next(line for line in self.lines if line.node.id == node)
        for missing in ranges:
            holders = self._place.holders(missing.shard) if missing.shard < self._place.shards else ()
            if self._repair is not None and node in [holder.id for holder in holders]:
                self._repair(node, missing, line.tell_repaired)
            elif self._is_new(f"foreign {node}"):
                _log.warning(
                    "shadow node %d asks for copies of shard %d, which it does not hold: they are not sent "
                    "again. Is its job file another one?",
                    *(node, missing.shard),
                )

    def _is_new(self, subject: str) -> bool:
        """Return whether something is noted for the first time. Each line has a thread."""
        with self._noting:
            new = subject not in self._noted
            self._noted.add(subject)
        return new

    def _say_superseded(self, by: str) -> None:
        """Log that another start has begun; not on all ranks, because all are told."""
        host = f", on {shortened(by)}" if by else ""
        words = _SUPERSEDED % host
        level = logging.WARNING if self._place.first else logging.DEBUG
        say(level, TRAINER_SUPERSEDED(why=words), "%s", words)

    def _say_trouble(self, node: int, reply: pb.RecordReply) -> None:
        """Log that a node's trouble has changed: while it goes on, more and more rarely."""
        repetition = self._repetitions[node]
        left_out = repetition.again(reply.iteration) if reply.trouble else repetition.over()
        if left_out is None:
            return
        event = TRAINER_NODE_TROUBLE(node=node, why=reply.trouble)
        words = f"{reply.trouble or 'recovered'}{left_out_words(left_out)}"
        say(logging.WARNING, event, "shadow node %d: %s", node, words)


def filled_shards(filled: Mapping[int, frozenset[int]], layout: Layout) -> list[list[int]]:
    """Return shards, each with the parameters that a node says to have, of those that the layout has there.

    All ranks are told of them, so that a node's nonsense must not count.
    """
    return [
        [shard, *sorted(numbers.intersection(layout.of_shard(shard)))]
        for shard, numbers in sorted(filled.items())
        if shard < layout.shards
    ]


def seed_at_start(
    place: Place,
    layout: Layout,
    start: Start,
    seeders: Mapping[int, Seeder],
    filled: Mapping[int, Mapping[int, Set[int]]] = MappingProxyType({}),
) -> None:
    """Send this rank's share of the shards to every holder that has not kept its state.

    Args:
        place: This rank's place.
        layout: The layout of its DP group.
        start: The start of training.
        seeders: Those of the nodes that have begun.
        filled: Parameters that nodes have of former ranks, by node and shard.
    """
    plan = start.plan
    holders = plan.holders if start.same_holds and isinstance(plan, FromNodes) else {}
    for shard in range(place.shards):
        if not (numbers := seeded_by(place, layout, shard)):
            continue
        seeded = holders.get((place.group, shard), ())
        for node in place.holders(shard):
            if node.id in seeders and node.id not in seeded:
                by_itself = filled.get(node.id, {}).get(shard, frozenset())
                seeders[node.id].want(shard, [number for number in numbers if number not in by_itself])


def give_buffers(
    place: Place, buffers: Buffers, start: Start, seeders: Mapping[int, Seeder], deadline: float
) -> None:
    """Send all buffers to all nodes, unless the restored record has them; wait for that until the deadline.

    Records carry buffers too, but only a few MiB at a time: until all have arrived, no iteration is complete.
    A warning names the nodes that have not received all buffers.
    """
    iteration = start.next_iteration - 1
    plan = start.plan
    # A node that needs no seeds gets the record apart from them, which comes with seeds otherwise.
    records = [start.record] if isinstance(plan, FromNodes) and plan.former else []
    if buffers.names - start.record.buffers.keys():
        records += (
            pb.IterationRecord(
                iteration=iteration,
                buffers={name: state.dumps(later()) for name, later in lot.items()},
            )
            for lot in buffers.all()
        )
    if not records:
        return
    for node, seeder in seeders.items():
        shard = next(s for s in range(place.shards) if node in [holder.id for holder in place.holders(s)])
        seeder.give(shard, records)
    without = []
    for node, seeder in seeders.items():
        if not seeder.records_done.wait(max(deadline - time.monotonic(), 0)):
            without.append(f"shadow node {node} (not in time)")
        elif seeder.given_up:
            without.append(f"shadow node {node} ({seeder.given_up})")
    if without:
        _log.warning(
            "buffers and frozen parameters have not all reached %s: step records carry %d MiB each, and "
            "until then a restore can't use these nodes' shards",
            ", ".join(without),
            FIRST_BYTES >> 20,
        )


_POLL_SECONDS: Final = 0.1
_FIRST_POLL_SECONDS: Final = 0.01
"""Streams take some 50 ms to connect after a restart; each further poll waits longer."""
_STATUS_SECONDS: Final = 2.0

_STREAM_HINTS: Final = {
    "switch": "streams need `checkmate run` of this job: `checkmate status JOB` shows them",
    "host": "each rank connects to the nodes' addresses for gradients, and its log says why it can't",
}

Holds = Mapping[int, Mapping[int, pb.HoldStatus] | str]
"""By node: its holds by shard, or why it has not answered."""


def await_ready(place: Place, stubs: Stubs, incarnation: int, deadline: float) -> str:
    """Wait until all holds of the group are connected and seeded. Return in words those that are not."""
    pause = _FIRST_POLL_SECONDS
    while True:
        lacking = _lacking(place, stubs, incarnation)
        if not lacking or time.monotonic() > deadline:
            hint = (
                [_STREAM_HINTS[place.job.copies]]
                if any(reason.endswith(" connected") for reason in lacking)
                else []
            )
            return "; ".join([*lacking, *hint])
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL_SECONDS)


def await_stepped(place: Place, stubs: Stubs, incarnation: int, iteration: int, deadline: float) -> str:
    """Wait until all live holds of the group have stepped an iteration. Return missing shards in words."""
    while True:
        answers = _holds(place, stubs, incarnation)
        holds = [
            hold for answer in answers.values() if not isinstance(answer, str) for hold in answer.values()
        ]
        stepped_shards = {hold.shard.shard for hold in holds if hold.seeded and hold.stepped >= iteration}
        missing = [shard for shard in range(place.shards) if shard not in stepped_shards]
        silent = [answers[node.id] for shard in missing for node in place.holders(shard)]
        waiting = any(hold.live and hold.stepped < iteration for hold in holds)
        waiting |= any(isinstance(reply, str) and not reply.startswith(UNREACHABLE) for reply in silent)
        if waiting and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
            continue
        return "; ".join(f"shard {shard}: {_progress(place, shard, answers)}" for shard in missing)


def _progress(place: Place, shard: int, answers: Holds) -> str:
    """Return the progress of a shard's holders, in words."""
    words = []
    for node in place.holders(shard):
        holds = answers[node.id]
        if isinstance(holds, str):
            words.append(f"shadow node {node.id}: {holds}")
            continue
        hold = holds.get(shard)
        at = at_iteration(hold.stepped) if hold is not None and hold.seeded else "not seeded"
        words.append(f"shadow node {node.id} is {at}")
    return ", ".join(words)


def _holds(place: Place, stubs: Stubs, incarnation: int) -> Holds:
    """Ask the nodes for their holds of the group in this incarnation."""
    nodes, group = [node.id for node in place.nodes], (place.group, incarnation)
    answers: dict[int, dict[int, pb.HoldStatus] | str] = {}
    for node, status in stubs.statuses(nodes, _STATUS_SECONDS).items():
        if isinstance(status, str):
            answers[node] = status
        else:
            holds = [hold for hold in status.holds if (hold.shard.group, hold.incarnation) == group]
            answers[node] = {hold.shard.shard: hold for hold in holds}
    return answers


def _lacking(place: Place, stubs: Stubs, incarnation: int) -> list[str]:
    """Return why nodes of the group are not ready, in words; empty if all are."""
    reasons = []
    for number, holds in _holds(place, stubs, incarnation).items():
        if isinstance(holds, str):
            reasons.append(f"{node_name(place.job, number)}: {holds}")
            continue
        for shard in range(place.shards):
            is_holder = number in [node.id for node in place.holders(shard)]
            if is_holder and (trouble := _not_ready(holds.get(shard))):
                reasons.append(f"shadow node {number}, shard {shard}: {trouble}")
    return reasons


def _not_ready(hold: pb.HoldStatus | None) -> str:
    """Return why a hold can't follow yet, or ""."""
    if hold is None:
        return "not begun"
    if hold.connected < hold.streams:
        return f"{hold.connected} of {counted(hold.streams, 'stream')} connected"
    return "" if hold.seeded else "not seeded"
