"""Holdings of a switch whose streams are all connected."""

from __future__ import annotations

from controlplane import streams
from controlplane.entities import Holdings
from controlplane.network import Network
from controlplane.plan import SwitchPlan


def connect_all(network: Network, plan: SwitchPlan, incarnation: int = 3) -> Holdings:
    """Return the switch's entries when every stream is connected."""
    holdings = plan.holdings.copy()
    stub = network.switches[plan.switch].stub
    for key, stream in plan.streams.items():
        peer = streams.StreamConnection(stream.nic.ip, stream.nic.mac, 5000 + key[1], 1)
        holdings.put(streams.rewrite(key, incarnation, peer, stub))
        holdings.put(streams.expect(key[0], incarnation))
    return holdings
