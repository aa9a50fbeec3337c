"""A shadow node: its holds, when they step, and what trainers and other nodes may ask of it.

Reader threads fill buckets, one thread steps, gRPC's threads call the methods below. One lock, `changed`,
covers all but what a hold's own lock does; nobody steps, receives or talks to the network while holding it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import torch

from checkmate import state
from checkmate.layout import Layout
from checkmate.optimizers import UnsupportedOptimizer
from checkmate.rpc import shadow_pb2 as pb
from checkmate.schema import Job
from checkmate.shadow.commit import NEVER, Committee, Progress
from checkmate.shadow.connect import RECEIVE_BUFFER
from checkmate.shadow.connecting import Connector
from checkmate.shadow.group import Group, Refused, check_begin, check_job, reusable, warnings
from checkmate.shadow.hold import Hold
from checkmate.shadow.receive import Inlet, Reader
from checkmate.shadow.records import Records
from checkmate.shadow.replica import Replica
from checkmate.shadow.streams import hold_plans

log = logging.getLogger("checkmate")

GRACE = 2.0
"""Seconds for which a stream may stand below its recorded end before the rest is lost."""
QUIET = 0.2
"""A fenced node reads on until nothing has come for so many seconds."""

_TICK = 0.1
_SEED_SECONDS = 5.0  # after which they are asked for again


class Node:
    """One shadow node of a job. `close` ends its threads."""

    def __init__(
        self,
        job: Job,
        node_id: int,
        *,
        receive_buffer: int = RECEIVE_BUFFER,
        grace: float = GRACE,
        threads: int | None = None,
    ) -> None:
        self.job, self.id, self.grace = job, node_id, grace
        self.plans = hold_plans(job, node_id)
        self.nics = [str(nic.ip) for nic in job.node(node_id).nics]
        self.receive_buffer = receive_buffer
        self.changed = threading.Condition()
        self.groups: dict[int, Group] = {}
        self.committee = Committee(node_id, self._ids(), -1, time.monotonic())
        self.incarnation = 0
        self.fenced = False
        self.step_seconds = 0.0
        self.troubles: list[str] = []
        self._reserved: dict[int, float] = {}
        self._asked: dict[tuple[int, int], tuple[float, frozenset[int]]] = {}
        self._stepping = False
        self._stopping = False
        self._threads = threads
        self.readers = [Reader(f"nic {ip}", self.touch, self._broken) for ip in self.nics]
        self._connector = Connector(self.readers, self.nics, receive_buffer, self.touch)
        self._workers = [
            threading.Thread(target=self._step_forever, name="steps", daemon=True),
            threading.Thread(target=self._watch_forever, name="watch", daemon=True),
        ]
        for worker in self._workers:
            worker.start()

    def _ids(self) -> list[int]:
        return [node.id for node in self.job.shadow_nodes]

    # What happens by itself

    def touch(self) -> None:
        """Something came: see what it changes."""
        with self.changed:
            self._refresh()

    def _refresh(self) -> None:
        live = []
        for group in self.groups.values():
            for hold in group.holds:
                if hold.settled:
                    continue
                hold.update(group.records)
                if not self.fenced and hold.may_go_live(self.committee.committed):
                    hold.live, hold.ahead, hold.trouble = True, 3, ""
                    log.info(
                        "group %d, shard %d: live at iteration %d",
                        hold.plan.group,
                        hold.plan.shard,
                        hold.stepped,
                    )
                if hold.live:
                    live.append(hold)
        self.committee.report(
            Progress(
                self.committee.incarnation,
                min((hold.in_full for hold in live), default=NEVER),
                max((hold.stepped for hold in live), default=NEVER),
                bool(live) and not self.fenced,
                self.committee.mine.patience,
            )
        )
        if not self.fenced:
            self.committee.decide(time.monotonic())
        self.changed.notify_all()

    def _due(self) -> list[tuple[Group, Hold, int]]:
        if self.fenced:
            return []
        committed, alone = self.committee.committed, self.committee.nobody_live
        return [
            (group, hold, due)
            for group in self.groups.values()
            for hold in group.holds
            if (due := hold.due(committed, alone=alone)) is not None
        ]

    def _step_forever(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        while True:
            with self.changed:
                while not (due := self._due()) and not self._stopping:
                    self.changed.wait()
                if self._stopping:
                    return
                self._stepping = True
            start = time.monotonic()
            for group, hold, iteration in due:
                self._step(group, hold, iteration)
            self.step_seconds = time.monotonic() - start
            with self.changed:
                self._stepping = False
                self._forget()
                self._refresh()
            for reader in self.readers:
                reader.wake()

    def _step(self, group: Group, hold: Hold, iteration: int) -> None:
        try:
            troubles = hold.step(iteration, group.records.step(iteration))
        except Exception as error:
            log.exception("iteration %d can't be stepped", iteration)
            troubles = [f"iteration {iteration} can't be stepped: {error}"]
        if troubles:
            hold.doubtful = True
            hold.trouble = "; ".join(troubles)
            log.error("group %d, shard %d: %s", hold.plan.group, hold.plan.shard, hold.trouble)
        with self.changed:
            group.records.stepped(iteration)

    def _forget(self) -> None:
        now = time.monotonic()
        for iteration in [t for t, until in self._reserved.items() if until < now]:
            self._release(iteration)
        for group in self.groups.values():
            group.records.forget([hold.released for hold in group.holds], self._reserved)

    def _watch_forever(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._stopping, _TICK)
                if self._stopping:
                    return
                self._forget()
                if not self.fenced:
                    self._find_gaps(time.monotonic())
                self._refresh()

    def _find_gaps(self, now: float) -> None:
        for group in self.groups.values():
            for hold in group.holds:
                if hold.settled or (lost := hold.gap(group.records, now, self.grace)) is None:
                    continue
                last = hold.stepped if hold.seeded else None
                hold.ahead *= 2
                iteration = hold.joinable(group.newest)
                hold.trouble = f"a gap: {lost}; " + (
                    f"iteration {last} was its last; " if last is not None else ""
                )
                hold.trouble += f"it joins again at iteration {iteration}"
                log.warning("group %d, shard %d: %s", hold.plan.group, hold.plan.shard, hold.trouble)
                hold.join(iteration)
                self._connect(group, hold)

    def _connect(self, group: Group, hold: Hold) -> None:
        for reader in self.readers:
            reader.wake()  # to close what was closed
        for inlet in hold.inlets:
            self._connector.connect(inlet, group.begin.incarnation)

    def _broken(self, inlet: Inlet) -> None:
        """A connection broke: it goes on where it stood, and a gap shows if something was sent meanwhile."""
        log.warning("%s: %s; connecting again", inlet.plan, inlet.broken)
        with self.changed:
            group = self.groups.get(inlet.plan.group)
            if group is not None and not inlet.closed:
                self._connector.connect(inlet, group.begin.incarnation)

    # What trainers ask

    def status(self, job: str) -> pb.NodeStatus:
        """What the node is and where it stands."""
        check_job(self.job, job)
        with self.changed:
            holds = [(group, hold) for group in self.groups.values() for hold in group.holds]
            return pb.NodeStatus(
                job=self.job.job,
                node=self.id,
                holds_nothing=not any(
                    hold.replica.at or hold.joined > 0 or hold.receiving >= 0 for _, hold in holds
                ),
                fenced=self.fenced,
                incarnation=self.incarnation,
                holds=[hold.status(group.begin) for group, hold in holds],
                torch=torch.__version__,
                capability=torch.backends.cpu.get_cpu_capability(),
                trouble=self.troubles,
                step_seconds=self.step_seconds,
                memory_bytes=resident(),
                nics=[
                    pb.NicStatus(ip=ip, bytes=reader.bytes)
                    for ip, reader in zip(self.nics, self.readers, strict=True)
                ],
            )

    def begin(self, request: pb.BeginRequest) -> list[str]:
        """A DP group starts, or this node has come back to it. `Refused` where it doesn't fit; warnings."""
        layout = check_begin(self.job, request)
        with self.changed:
            old = self.groups.get(request.group)
            same = old is not None and old.begin.incarnation == request.incarnation
            if self.fenced and self.committee.incarnation == request.incarnation:
                raise Refused(
                    f"incarnation {request.incarnation} is fenced: training starts in a new one",
                    precondition=True,
                )
            if same and old is not None and old.layout.fingerprint == layout.fingerprint:
                return warnings(request)
            group = self._new_group(request, layout, old)
            for hold in old.holds if old is not None else ():
                hold.close()
            self.groups[request.group] = group
            if self.committee.incarnation != request.incarnation:
                self.committee = Committee(self.id, self._ids(), request.incarnation, time.monotonic())
                self.incarnation, self.fenced = request.incarnation, False
            for hold in group.holds:
                self._connect(group, hold)
            self._refresh()
        log.info(
            "group %d: incarnation %d begins with iteration %d",
            request.group,
            request.incarnation,
            request.next_iteration,
        )
        return warnings(request)

    def _new_group(self, request: pb.BeginRequest, layout: Layout, old: Group | None) -> Group:
        records = Records(request.ranks, request.first_iteration)
        group = Group(request, layout, records)
        kept = {hold.plan.shard: hold for hold in reusable(old, request, layout)}
        if kept and old is not None:
            records.adopt(old.records.served(request.first_iteration - 1))
        late = request.next_iteration > request.first_iteration
        for plan in self.plans:
            if plan.group != request.group:
                continue
            before = kept.get(plan.shard)
            try:
                replica = before.replica if before is not None else self._replica(layout, plan.shard, request)
            except (UnsupportedOptimizer, ValueError) as error:
                raise Refused(f"the optimizer: {error}") from None
            group.holds.append(
                Hold(
                    plan,
                    layout,
                    replica,
                    channels=self.job.channels,
                    ranks=request.ranks,
                    first=request.first_iteration,
                    joined=request.next_iteration + 3 if late else request.first_iteration,
                )
            )
        return group

    def _replica(self, layout: Layout, shard: int, request: pb.BeginRequest) -> Replica:
        return Replica(layout, shard, request.optimizer, exact=not request.device.startswith("cuda"))

    def seed(self, seeds: state.SeedReader) -> list[int]:
        """Take parameters; those whose next gradients are gone must come again. `StateError`, `Refused`."""
        header = seeds.header
        group = self._group(header.job, header.shard.group, header.incarnation)
        hold = group.hold(header.shard.shard)
        parameters = seeds.all()
        late = hold.load(header.iteration, ((n, t, s) for n, (t, s) in parameters.items()))
        with self.changed:
            group.records.adopt(header.record)
            self._asked.pop((header.shard.group, header.shard.shard), None)
            self._refresh()
        return late

    def record(self, part: pb.RecordPart) -> pb.RecordReply:
        """Take a rank's part of a step record."""
        group = self._group(part.job, part.group, part.incarnation)
        if part.position >= group.begin.ranks:
            raise Refused(f"position {part.position}: DP group {part.group} has {group.begin.ranks} ranks")
        with self.changed:
            group.records.add(part, time.monotonic())
            self._refresh()
            return pb.RecordReply(iteration=part.iteration, wanted=self._wanted(group, time.monotonic()))

    def _wanted(self, group: Group, now: float) -> list[pb.SeedWanted]:
        """What trainers are to send: of shards that have come whole once, that no other node can give."""
        found = []
        for hold in group.holds:
            key = (hold.plan.group, hold.plan.shard)
            if hold.settled or hold.live or hold.in_full < hold.joined:
                continue
            wanted = hold.wanted()
            asked, what = self._asked.get(key, (0.0, frozenset()))
            if not wanted or (now - asked < _SEED_SECONDS and what & set(wanted)):
                continue
            self._asked[key] = (now, frozenset(wanted))
            found.append(pb.SeedWanted(shard=hold.plan.shard, parameters=wanted))
        return found

    def fence(self, job: str, timeout: float) -> pb.NodeStatus:
        """Stop committing in this incarnation for good, read on until it is quiet, and say what there is."""
        check_job(self.job, job)
        deadline = time.monotonic() + timeout
        with self.changed:
            self.fenced = True
            self.changed.wait_for(lambda: not self._stepping, timeout)
            self._refresh()
        since, seen = time.monotonic(), self._seen()
        while time.monotonic() < min(deadline, since + QUIET):
            time.sleep(QUIET / 10)
            if (now_seen := self._seen()) != seen:
                since, seen = time.monotonic(), now_seen
        self.touch()
        return self.status(job)

    def _seen(self) -> tuple[int, ...]:
        return (*(reader.bytes for reader in self.readers), *(g.records.count for g in self.groups.values()))

    def settle(self, job: str, iteration: int, run: str) -> pb.NodeStatus:
        """Step up to the target, then drop streams and gradients; what can't is emptied."""
        check_job(self.job, job)
        with self.changed:
            if not self.fenced and self.groups:
                raise Refused("the node is not fenced: call Fence first", precondition=True)
            groups = list(self.groups.values())
        for group in groups:
            for hold in list(group.holds):
                fits = hold.live and not hold.doubtful and group.begin.run == run
                while fits and hold.released < min(iteration, hold.in_full):
                    self._step(group, hold, hold.released + 1)
                if fits and hold.stepped == iteration:
                    hold.settle()
                    continue
                hold.close()
                with self.changed:
                    group.holds.remove(hold)
        with self.changed:
            self._forget()
        return self.status(job)

    def _group(self, job: str, number: int, incarnation: int) -> Group:
        check_job(self.job, job)
        group = self.groups.get(number)
        if group is None or group.begin.incarnation != incarnation:
            have = f"incarnation {group.begin.incarnation}" if group else "none"
            raise Refused(
                f"DP group {number} has not begun incarnation {incarnation} here (there is {have})",
                precondition=True,
            )
        return group

    # Reading

    def reserve(self, job: str, iteration: int, seconds: float) -> pb.ReserveReply:
        """Keep an iteration that is not committed yet, once it is stepped."""
        check_job(self.job, job)
        with self.changed:
            live = [hold for group in self.groups.values() for hold in group.holds if hold.live]
            stepped = max((hold.stepped for hold in live), default=-1)
            if not live or self.fenced or iteration <= max(stepped, self.committee.committed):
                return pb.ReserveReply(granted=False, stepped=stepped)
            for hold in live:
                hold.replica.reserve(iteration)
            self._reserved[iteration] = max(self._reserved.get(iteration, 0.0), time.monotonic() + seconds)
            return pb.ReserveReply(granted=True, stepped=stepped)

    def release(self, job: str, iteration: int) -> None:
        """An iteration is not needed any more."""
        check_job(self.job, job)
        with self.changed:
            self._release(iteration)

    def _release(self, iteration: int) -> None:
        if self._reserved.pop(iteration, None) is not None:
            for group in self.groups.values():
                for hold in group.holds:
                    hold.replica.release(iteration)

    def fetch(self, request: pb.FetchRequest, timeout: float) -> Iterator[pb.Seeds]:
        """A reserved iteration of a shard, or the settled one; waits until it is stepped."""
        check_job(self.job, request.job)
        group = self.groups.get(request.shard.group)
        if group is None:
            raise Refused(f"DP group {request.shard.group} has not begun here", precondition=True)
        hold = group.hold(request.shard.shard)
        with self.changed:
            reserved = request.iteration in self._reserved
            if not reserved and hold.stepped != request.iteration:
                raise Refused(
                    f"iteration {request.iteration} of shard {request.shard.shard} is not reserved; "
                    f"it is at {hold.stepped}",
                    precondition=True,
                )
            self.changed.wait_for(lambda: hold.released >= request.iteration or self._stopping, timeout)
            if hold.stepped < request.iteration:
                raise Refused(f"iteration {request.iteration} was not stepped in time", precondition=True)
            if hold.doubtful:
                raise Refused(f"shard {request.shard.shard} is doubtful: {hold.trouble}", precondition=True)
            begin = group.begin
            header = pb.SeedHeader(
                job=self.job.job,
                incarnation=begin.incarnation,
                shard=request.shard,
                iteration=request.iteration,
                parameters=request.parameters or hold.parameters,
                record=group.records.served(request.iteration),
                layout=begin.layout,
                optimizer=begin.optimizer,
                run=begin.run,
            )
        return state.to_seeds(header, hold.read(request.iteration, request.parameters))

    def close(self) -> None:
        """End all threads, close all sockets."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        self._connector.stop()
        for group in self.groups.values():
            for hold in group.holds:
                hold.close()
        for worker in self._workers:
            worker.join()
        for reader in self.readers:
            reader.stop()


def resident() -> int:
    """This process's resident memory, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE


_PAGE = 4096
