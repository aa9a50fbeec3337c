"""The network that a set of jobs describes: switches, links, hosts, and the paths between them.

Pure. Built once for a set of jobs; each feature asks it for ports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property

from checkmate.job.boundaries import Boundary, Stream, boundaries, streams
from checkmate.job.schema import Attachment, Host, Job, Nic, Switch


class Network:
    """Switches, links and hosts of all jobs. The jobs have passed `checkmate.job.checks`."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self.switches: dict[str, Switch] = {}
        self._links: dict[str, dict[int, Attachment]] = {}
        for job in jobs:
            for switch in job.fabric.switches:
                self.switches[switch.name] = switch
                self._links.setdefault(switch.name, {})
            for a, b in job.fabric.links:
                self._links[a.switch][a.port] = b
                self._links[b.switch][b.port] = a

    @cached_property
    def interfaces(self) -> tuple[Host, ...]:
        """Every interface on the training network: those of training hosts, then shadow NICs."""
        interfaces = [interface for job in self.jobs for _, interface in job.interfaces()]
        return tuple(sorted(interfaces, key=lambda host: isinstance(host, Nic)))

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """Every stream of every job."""
        return tuple(stream for job in self.jobs for stream in streams(job))

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """Every boundary of every job."""
        return tuple(boundary for job in self.jobs for boundary in boundaries(job))

    @cached_property
    def _boundaries(self) -> dict[tuple[str, int], Boundary]:
        return {(boundary.job, boundary.number): boundary for boundary in self.boundaries}

    def boundary(self, job: str, number: int) -> Boundary:
        """Return a job's boundary. Raise `KeyError` if it has none of this number."""
        return self._boundaries[job, number]

    def links(self, switch: str) -> dict[int, str]:
        """Return the switch's link ports, each with the switch at its other end."""
        return {port: far.switch for port, far in self._links[switch].items()}

    def far_port(self, switch: str, port: int) -> int:
        """Return the port at the other end of a link port."""
        return self._links[switch][port].port

    def port_towards(self, switch: str, place: Attachment) -> int | None:
        """Return the port of `switch` that leads to `place`, or `None` if there is none."""
        if place.switch == switch:
            return place.port
        return self.port_to_switch(switch, place.switch)

    def arrival_port(self, switch: str, place: Attachment) -> int | None:
        """Return the port of `switch` at which frames from `place` arrive, on the paths that they take."""
        if place.switch == switch:
            return place.port
        return dict(self._hops(place.switch, switch)).get(switch)

    def _hops(self, start: str, end: str) -> Iterator[tuple[str, int]]:
        """Yield the switches on the path after `start`, each with its arrival port; none without a path."""
        switch = start
        while switch != end and (out := self.port_to_switch(switch, end)) is not None:
            far = self._links[switch][out]
            switch = far.switch
            yield switch, far.port

    def stub_ports(self, switch: str, origin: str) -> Set[int]:
        """Return the link ports of `switch` at which frames from the stub of `origin` may arrive.

        A stub answers by the port of the request, so each link to its own switch is among them.
        """
        return self._stub_ports.get((switch, origin), frozenset())

    @cached_property
    def _stub_ports(self) -> dict[tuple[str, str], set[int]]:
        ports: dict[tuple[str, str], set[int]] = {}
        for origin in self.switches:
            for end in self.switches:
                for hop, port in self._hops(origin, end):
                    ports.setdefault((hop, origin), set()).add(port)
            for far in self._links[origin].values():
                ports.setdefault((far.switch, origin), set()).add(far.port)
        return ports

    def port_to_switch(self, switch: str, destination: str) -> int | None:
        """Return the port of `switch` on a shortest path to `destination`: the lowest of several."""
        distance = self._distances[destination]
        if switch not in distance:
            return None
        return min(
            port for port, far in self.links(switch).items() if distance.get(far) == distance[switch] - 1
        )

    @cached_property
    def _distances(self) -> dict[str, dict[str, int]]:
        """The number of links to each switch, from the switches that reach it."""
        return {switch: self._distances_to(switch) for switch in self.switches}

    def _distances_to(self, root: str) -> dict[str, int]:
        distances = {root: 0}
        queue = [root]
        for visited_switch in queue:  # it grows
            for far in self.links(visited_switch).values():
                if far not in distances:
                    distances[far] = distances[visited_switch] + 1
                    queue.append(far)
        return distances

    def tree_ports(self, switch: str) -> set[int]:
        """Return the link ports that flooding uses: those of a spanning tree, to prevent broadcast storms.

        The root of each connected component's tree is its alphabetically first switch. Of parallel links,
        the one with the lowest port at the lower end is in the tree.
        """
        root = min(self._distances[switch])
        ports = set()
        for child in self._distances[root].keys() - {root}:
            port = self.port_to_switch(child, root)
            assert port is not None  # `child` reaches `root`
            parent = self._links[child][port]
            if child == switch:
                ports.add(port)
            elif parent.switch == switch:
                ports.add(parent.port)
        return ports
