"""Failures of controller, switch and links while training continues.

The controller is killed, the switch restarted, links lose and delay packets, a shadow stream has a gap. At
the end trainers and shadow nodes have the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyroute2 import IPRoute

from tests.support.training import faulty
from topologies.kernel import loss, namespaces

pytestmark = [*faulty.marks, pytest.mark.slow]


def test_the_controller_is_killed_and_comes_back(name: str, tmp_path: Path) -> None:
    with faulty.job(name, tmp_path, gated=True) as run:
        run.train(8)
        run.controller.kill()
        run.train(16)
        run.controller.restart()
        outcome = faulty.check(run)
    assert outcome.record.repeated == {}


def test_a_rank_dies_while_there_is_no_controller(name: str, tmp_path: Path) -> None:
    """The new streams connect once the controller is back."""
    with faulty.job(name, tmp_path, gated=True) as run:
        run.training.let(14)
        run.await_iteration(8)
        run.controller.kill()
        run.crew.kill_children(run.training.ranks["rank1"])
        run.until(lambda: run.starts(1) == 2, "rank1 to start again")
        run.controller.restart()
        faulty.check(run, repeated=1)


def test_the_switch_is_restarted(name: str, tmp_path: Path) -> None:
    """It restarts without entries; the controller writes them, and TCP retransmits lost segments."""
    with faulty.job(name, tmp_path, gated=True) as run:
        run.training.let(faulty.ITERATIONS)
        run.await_iteration(8)
        run.lab.restart_switch("tor")
        outcome = faulty.check(run)
    assert outcome.record.repeated == {}


def test_training_links_lose_and_delay(name: str, tmp_path: Path) -> None:
    with faulty.job(name, tmp_path, loss=0.01, jitter=0.005) as run:
        outcome = faulty.check(run)
    assert outcome.record.repeated == {}


def test_a_shadow_stream_has_a_gap(name: str, tmp_path: Path) -> None:
    """Copies for one NIC are lost behind the switch: its shard is seeded again, and correct at the end."""
    with faulty.job(name, tmp_path, gated=True) as run:
        run.train(8)
        loss.add(run.lab.namespace("tor"), "port5", 0.99)
        run.train(10)
        lose_nothing(run.lab.namespace("tor"), "port5")
        run.until(lambda: not run.live(0), "shadow0 to notice")
        assert "not come" in run.training.shadows["shadow0"].error_text()
        at = run.training.next_iteration()
        while not run.live(0):
            at += 1
            assert at < faulty.ITERATIONS - 2, run.training.status(0)
            run.train(at)
            run.pause(1.2)
        outcome = faulty.check(run)
    assert outcome.record.repeated == {}


def test_a_record_that_one_shadow_node_lacks_is_copied_from_another(name: str, tmp_path: Path) -> None:
    """Rank 1's records do not reach shadow1 from iteration 8 on; then it dies, and nothing is repeated."""
    patient = ("--grace", "60")
    with faulty.job(name, tmp_path, gated=True, shadow_options=patient) as run:
        run.train(8)
        run.until(lambda: run.stepped(0) == run.stepped(1) == 7, "both to have stepped iteration 7")
        shadow1 = str(run.lab.topology.host("shadow1").mgmt)
        with namespaces.entered(run.lab.namespace("rank1")), IPRoute() as ip:
            ip.route("add", dst=shadow1, type="blackhole")
        run.train(9)
        run.until(lambda: _in_full(run, 0) == 8, "shadow0 to have all of iteration 8")
        assert _in_full(run, 1) == 7
        run.crew.kill_children(run.training.ranks["rank1"])
        # Otherwise the dead rank's kernel would still deliver them.
        run.until(lambda: bool(run.training.status(1)["fenced"]), "shadow1 to be fenced")
        with namespaces.entered(run.lab.namespace("rank1")), IPRoute() as ip:
            ip.route("del", dst=shadow1, type="blackhole")
        outcome = faulty.check(run)
    restored = [e.more["iteration"] for e in outcome.record.events[0] if e.name == "restored"]
    assert restored == [0, 9]


def _in_full(run: faulty.Faulty, node: int) -> int:
    return int(run.hold(node)["in_full"])


def lose_nothing(namespace: str, interface: str) -> None:
    """Undo `loss.add`."""
    with namespaces.netlink(namespace) as ip:
        index = ip.link_lookup(ifname=interface)[0]
        kinds = {dict(qdisc["attrs"]).get("TCA_KIND") for qdisc in ip.get_qdiscs(index)}
        ip.tc("del", "clsact" if "clsact" in kinds else "netem", index)
