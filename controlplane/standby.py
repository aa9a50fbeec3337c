"""A controller that waits beside a primary, and tells when to take over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from checkmate.events.kinds import CONTROLLER_CLAIMS, SWITCH_LOST
from checkmate.events.process_log import say
from checkmate.job.following import JobFiles, JobsToServe, Unusable
from checkmate.job.schema import Job, Switch
from checkmate.job.yaml_lines import JobError
from checkmate.keys.errors import KeysError
from controlplane.controller import LOG, RECONNECT_SECONDS
from controlplane.election import ServerStanding, StandbyVerdict, SwitchWatch, jobs_digest
from controlplane.errors import ControlError, RefusalLost
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession
from controlplane.serve import POLL_SECONDS, log_refusals, log_unchanged
from controlplane.tasks import until_first


class Standby:
    """Watches the switches of jobs, and the job files, until this controller is to claim the switches."""

    def __init__(
        self,
        files: JobFiles,
        job_set: JobsToServe,
        check: Callable[[Sequence[Job]], object],
        unusable: Unusable,
    ) -> None:
        """Prepare. `check` raises `ControlError` or `KeysError` for jobs that could not be served.

        `unusable`: as for `JobFiles.jobs_to_serve`.
        """
        self._files, self._check, self._unusable = files, check, unusable
        self.jobs = job_set.jobs
        """The jobs as the files are now, or were when they last had no fault."""
        self._digests: set[int] = set()

    async def wait(self) -> list[str]:
        """Wait until the first reachable switch has no primary. Return the reachable ones.

        If the last primary had other job files, wait until they are the same.
        """
        while True:
            switches, digest = Network(self.jobs).switches, jobs_digest(self.jobs)
            self._digests.add(digest)
            watch, change = SwitchWatch(switches, digest, self._digests), asyncio.Event()
            looks = (_look(switch, watch, change) for switch in switches.values())
            await until_first(_until_free(watch, change), self._wait_for_change(), *looks)
            if watch.verdict is StandbyVerdict.CLAIM and digest == jobs_digest(self.jobs):
                return watch.reachable

    def read_again(self) -> bool:
        """Read the job files; return whether they have no fault."""
        try:
            job_set = self._files.jobs_to_serve(self._unusable)
            self._check(job_set.jobs)
        except (JobError, ControlError, KeysError) as error:
            log_unchanged(self._files, error)
            return False
        log_refusals(self._files, job_set)
        self._files.note_served(job_set)
        self.jobs = job_set.jobs
        return True

    async def _wait_for_change(self) -> None:
        """Return once the job files were changed, and have no fault."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._files.have_changed():
                await asyncio.sleep(POLL_SECONDS / 5)  # an editor may still be writing
                if self.read_again():
                    return


HEAD_START_SECONDS: Final = 4.0
"""For the primary of a switch that was away: it tries to connect in intervals of up to half that."""


async def _until_free(watch: SwitchWatch, change: asyncio.Event) -> None:
    """Wait until the switches are to be claimed. Log what keeps this controller from it."""
    last_verdict = None
    while (verdict := watch.verdict) is not StandbyVerdict.CLAIM or await _primary_returns(watch, change):
        if verdict is StandbyVerdict.CLAIM:
            continue  # that primary may have other job files
        if verdict is StandbyVerdict.OTHER_JOBS and last_verdict is not verdict:
            LOG.error(
                "the controller of switch %s has, or had, other job files: "
                "this one takes over only once they are the same; "
                "to begin with these files, start a controller without --standby",
                watch.first,
            )
        last_verdict = verdict
        change.clear()
        await change.wait()
    claims = CONTROLLER_CLAIMS(switch=watch.first)
    say(logging.WARNING, claims, "switch %s has no primary controller: taking over", watch.first)


async def _primary_returns(watch: SwitchWatch, change: asyncio.Event) -> bool:
    """Wait for the primary of a switch that is back. Return whether it was first."""
    deadline = asyncio.get_running_loop().time() + HEAD_START_SECONDS
    while watch.is_back and watch.verdict is StandbyVerdict.CLAIM:
        change.clear()
        seconds_left = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(change.wait(), max(seconds_left, 0.0))
        except TimeoutError:
            return False
    return watch.verdict is not StandbyVerdict.CLAIM


async def _look(switch: Switch, watch: SwitchWatch, change: asyncio.Event) -> None:
    """Tell the watch what a switch says, for ever."""
    last_error, is_retry = "", False

    def see(standing: ServerStanding) -> None:
        nonlocal is_retry
        is_retry = False
        watch.see(switch.name, standing)
        change.set()

    while True:
        try:
            async with SwitchSession(switch, Codec.for_switch(switch)) as session:
                last_error = ""
                await until_first(_listen(session, see), session.heartbeat(), session.ask_again())
        except ControlError as error:
            is_retry = isinstance(error, RefusalLost) and not is_retry
            if is_retry:
                continue
            if str(error) != last_error:
                event = SWITCH_LOST(switch=switch.name, why=str(error))
                say(logging.WARNING, event, "%s; trying again until it is back", error)
            last_error = str(error)
        watch.see(switch.name, None)
        change.set()
        await asyncio.sleep(RECONNECT_SECONDS)


async def _listen(session: SwitchSession, see: Callable[[ServerStanding], None]) -> None:
    async for standing in session.standings():
        see(standing)
