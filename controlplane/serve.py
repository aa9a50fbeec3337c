"""All switches of all jobs: write, serve, and follow the job files as they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from checkmate.base.wording import counted
from checkmate.events.kinds import JOBS_CHANGED, JOBS_REFUSED
from checkmate.events.process_log import say
from checkmate.job.following import JobFiles, JobsToServe, Unusable
from checkmate.job.schema import Job
from checkmate.job.yaml_lines import JobError
from checkmate.keys.errors import KeysError
from controlplane.controller import LOG, SwitchController
from controlplane.election import Candidacy, earlier_switches, jobs_digest, new_controller
from controlplane.errors import AnotherPrimary, ControlError, SwitchUnreachable
from controlplane.hello_keys import HelloKeys
from controlplane.network import Network
from controlplane.p4runtime import vacating
from controlplane.reconciling import Reconciliation
from controlplane.status import SwitchStatus, read_status

POLL_SECONDS = 0.5
AGAIN_SECONDS = 5.0
CONTROLLER = new_controller()
"""This process's number."""


class Fleet:
    """The controllers of all switches that the jobs name."""

    def __init__(self, keys: HelloKeys | None = None) -> None:
        """Prepare. `keys` reads those of the jobs."""
        self._keys = HelloKeys() if keys is None else keys
        self._hello_keys: dict[str, bytes] = {}
        self._digest = 0
        self.controllers: dict[str, SwitchController] = {}
        self.network = Network([])
        self._servers: dict[str, asyncio.Task[None]] = {}

    async def start(
        self,
        jobs: Sequence[Job],
        *,
        replace: bool = False,
        now: Collection[str] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> list[Reconciliation]:
        """Connect to every switch by order of names, check all plans, and only then write what is missing.

        With `now`, only those switches must be there, and `serve` connects to the others once they are.

        Raises:
            KeysError: The keys of role controller of a job are missing or can't be used.
            ControlError: A switch is unreachable or refuses.
        """
        self.prepare(jobs)
        reports: list[Reconciliation] = []
        try:
            claimed = [self.controllers[name] for name in self.controllers if now is None or name in now]
            for controller in claimed:
                await controller.open(replace=replace)
            if any(controller.vacated is not None for controller in claimed):
                await asyncio.sleep(vacating.QUEUE_SECONDS)
            for controller in claimed:
                if replace:
                    await controller.load()
                on_progress = None if progress is None else partial(progress, controller.switch.name)
                reports.append(await controller.write(on_progress))
        except BaseException as error:
            if isinstance(error, ControlError) and now is None and not replace:
                for report in reports:
                    await self.controllers[report.switch].revert()
            for controller in self.controllers.values():
                await controller.resume()
            await self.stop()
            raise
        return reports

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Read keys and check all plans, without a switch. Raise what `start` raises for these."""
        self._hello_keys.update(self._keys.secrets(jobs))
        self._keys.note_served(jobs, self._hello_keys)
        self._digest = jobs_digest(jobs)
        self.network = Network(jobs)
        self.controllers = {
            name: self._controller(name, self.network) for name in sorted(self.network.switches)
        }
        for controller in self.controllers.values():
            controller.check(self.network)

    def _controller(self, name: str, network: Network) -> SwitchController:
        candidacy = partial(self._candidacy, name)
        return SwitchController(network.switches[name], network, self._hello_keys, candidacy)

    def _candidacy(self, name: str) -> Candidacy:
        """Return a candidacy for a switch. The holder of an earlier switch also claims the others."""
        earlier = (
            self.controllers[earlier_name] for earlier_name in earlier_switches(name, self.controllers)
        )
        displaces = any(controller.session is not None for controller in earlier)
        current = self.controllers.get(name)
        return Candidacy(
            CONTROLLER, self._digest, displaces, returns=current is not None and current.term > 0
        )

    async def change(self, jobs: Sequence[Job]) -> list[Reconciliation]:
        """Change to another set of jobs. If a switch refuses, revert all of them and raise its error."""
        keys, keys_before = self._keys.secrets(jobs), dict(self._hello_keys)
        network, network_before, digest_before = Network(jobs), self.network, self._digest
        for controller in self.controllers.values():
            controller.check(network)
        new_controllers = {
            name: self._controller(name, network)
            for name in sorted(network.switches)
            if name not in self.controllers
        }
        changed_controllers: list[SwitchController] = []
        reports: list[Reconciliation] = []
        self._hello_keys.update(keys)
        self._digest = jobs_digest(jobs)
        try:
            for controller in self.controllers.values():
                _same_switch(controller, network)
                reports.append(await controller.apply(network))
                changed_controllers.append(controller)
            for controller in new_controllers.values():
                reports.append(await controller.connect())
        except ControlError:
            self._hello_keys.clear()
            self._hello_keys.update(keys_before)
            self._digest = digest_before
            for controller in changed_controllers:
                await controller.restore(network_before)
            for controller in new_controllers.values():
                if controller.session is not None:
                    await controller.apply(Network([]))
                    await controller.close()
            raise
        self.network = network
        self._keys.note_served(jobs, keys)
        for controller in self.controllers.values():
            await controller.renew()
        self.controllers |= new_controllers
        for name in [name for name in self.controllers if name not in network.switches]:
            await self._leave(name)
        return reports

    async def _leave(self, name: str) -> None:
        """Stop serving a switch that has no jobs any more. It is empty by now, unless it was unreachable."""
        controller = self.controllers.pop(name)
        server = self._servers.pop(name, None)
        if server is not None:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
        if controller.session is None:
            LOG.warning(
                "switch %s is unreachable and keeps its entries; `checkmate remove` removes them later", name
            )
        await controller.close()

    async def serve(self) -> None:
        """Serve every stub endpoint until cancelled. Raise the error that ends one of them."""
        while True:
            for name, controller in list(self.controllers.items()):
                if name not in self._servers:
                    self._servers[name] = asyncio.create_task(controller.serve())
            if self._servers:
                await asyncio.wait(
                    self._servers.values(), timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
            for name in [name for name, task in self._servers.items() if task.done()]:
                self._servers.pop(name).result()

    async def stop(self) -> None:
        """Close all sessions. Every switch keeps its entries."""
        for task in self._servers.values():
            task.cancel()
        await asyncio.gather(*self._servers.values(), return_exceptions=True)
        self._servers.clear()
        for controller in self.controllers.values():
            await controller.close()


async def status_now(controller: SwitchController) -> SwitchStatus | None:
    """Read the status of a controller's switch; `None` if it is away, or has no jobs any more."""
    session, network = controller.session, controller.network
    if session is None or controller.switch.name not in network.switches:
        return None
    try:
        return await read_status(session, network, controller.holdings)
    except SwitchUnreachable:
        return None  # `serve` logs it, and reconnects
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None  # the session was closed under the read


def _same_switch(controller: SwitchController, network: Network) -> None:
    """Raise `SwitchUnreachable` if a switch is described differently: its session can't change."""
    switch = network.switches.get(controller.switch.name)
    if switch is not None and switch != controller.switch:
        raise SwitchUnreachable(
            f"switch {switch.name} has changed in the job files since `checkmate run` began; "
            "stop `checkmate run` and start it again"
        )


def log_refusals(files: JobFiles, job_set: JobsToServe) -> None:
    """Log new faults of files whose jobs stay as they are, or are left out."""
    if why := files.fault_log.news(job_set.faults):
        say(logging.ERROR, JOBS_REFUSED(why=why), "refused; what is served of these files stays:\n%s", why)


def log_unchanged(files: JobFiles, error: Exception) -> None:
    """Log why the jobs stay as they are."""
    if isinstance(error, JobError):
        why = files.fault_log.news(error.faults) or f"{counted(len(error.faults), 'fault')} as before"
        say(logging.ERROR, JOBS_REFUSED(why=why), "the jobs are unchanged:\n%s", why)
    else:
        why = str(error) or repr(error)
        say(logging.ERROR, JOBS_REFUSED(why=why), "the jobs are unchanged: %s", why)


async def follow(files: JobFiles, fleet: Fleet, unusable: Unusable) -> None:
    """Apply every change of the job files. Log a change that can't be applied, and change nothing.

    If a switch is away, or another controller has it, try again.
    """
    retry_seconds, last_error = 0.0, ""  # 0 s: try at a change only
    while True:
        await asyncio.sleep(retry_seconds or POLL_SECONDS)
        has_changed = files.have_changed()
        if not (has_changed or retry_seconds):
            continue
        await asyncio.sleep(POLL_SECONDS / 5)  # an editor may still be writing
        before = {job.job for job in fleet.network.jobs}
        try:
            job_set = await asyncio.to_thread(files.jobs_to_serve, unusable)  # streams connect meanwhile
            jobs = job_set.jobs
            log_refusals(files, job_set)
            reports = await fleet.change(jobs)
        except Exception as error:  # noqa: BLE001 - the jobs of other owners are served on
            retry_seconds = AGAIN_SECONDS if isinstance(error, AnotherPrimary | SwitchUnreachable) else 0.0
            if not isinstance(error, JobError | ControlError | KeysError):
                LOG.exception("a defect of Checkmate")
            if has_changed or str(error) != last_error:  # a switch that is away is named once
                log_unchanged(files, error)
            last_error = str(error)
            continue
        retry_seconds, last_error = 0.0, ""
        files.note_served(job_set)
        now = {job.job for job in jobs}
        update_count = sum(report.updates for report in reports)
        for verb, names in (("added", now - before), ("removed", before - now)):
            if names:
                LOG.info("%s %s: %s", "job" if len(names) == 1 else "jobs", verb, ", ".join(sorted(names)))
        event = JOBS_CHANGED(added=sorted(now - before), removed=sorted(before - now), updates=update_count)
        say(logging.INFO, event, "job files or keys changed: %s written", counted(update_count, "update"))
