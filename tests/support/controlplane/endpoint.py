"""What the stub endpoint of a planned job sees before anything has connected."""

from __future__ import annotations

from checkmate.job.schema import Job
from controlplane.endpoint.endpoint import ConnectedStreams, View
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.plan import plan_switch


def empty_view(job: Job, key: bytes = bytes(32)) -> View:
    """Return the view at switch `tor0`; `key` is the one of the job's hellos."""
    network = Network([job])
    boundary_ids = plan_switch(network, "tor0", Holdings()).boundary_ids
    return View.from_network(network, "tor0", boundary_ids, ConnectedStreams(), {}, {job.job: key})
