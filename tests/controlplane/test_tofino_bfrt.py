"""The bfrt_python script: valid Python with existing names, which sets the values of the plan."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkmate.job.schema import Job
from checkmate.job.tofino.ports import resolve
from checkmate.job.validation import of_data
from controlplane import plan as planning
from controlplane.network import Network
from controlplane.tofino.bfrt import script
from controlplane.tofino.pfc import PfcPlan, pfc_plan, port_peers
from testbed.jobs import job_data, tofino_job_data
from tests.support.controlplane.bfrt_recorder import RecordedTable, TableSchema, of_sde, schemas_of, tree

CHIPS = {"tofino": "tf1", "tofino2": "tf2"}


def planned(target: str = "tofino", **kwargs: Any) -> tuple[Network, PfcPlan, str]:
    data = tofino_job_data(target=target, **kwargs)
    if target == "tofino2":
        switch = data["fabric"]["switches"][0]
        switch["front_panel"] = None
        switch["ports"] = {f"{number}/0": 8 * number for number in range(1, 9)}
        switch["ports"]["1/0"] = {"device_port": 136, "speed": "400G"}
    assert resolve(data) == []
    network = Network([of_data(Job, data)])
    plan = pfc_plan(network, network.switches["tor0"], planning.plan(network.jobs)["tor0"], 3)
    return network, plan, script(network.switches["tor0"], port_peers(network, "tor0")[0], plan)


def run(
    text: str, schemas: dict[str, TableSchema], chip: str
) -> tuple[dict[str, RecordedTable], dict[str, Any]]:
    """Execute a script like bfrt_python, on a switch whose ports' queues 0 have different numbers."""
    bfrt, tables = tree(schemas)
    ports = tables[f"{chip}.tm.port.cfg"]
    for port in range(512):
        ports.entries[(port, None)] = {
            b"pg_id": port // 4,
            b"ingress_qid_map": [1, 0],
            b"egress_qid_queues": [90, 8 * (port % 4)],
        }
    tables[f"{chip}.dev.device_configuration"].entries[()] = {b"pcie_cpu_port": 192}
    names: dict[str, Any] = {"bfrt": bfrt, "__builtins__": builtins}
    exec(compile(text, "tor0.py", "exec"), names)
    return tables, names


def sde_schemas(chip: str) -> dict[str, TableSchema]:
    """Return the schemas of an installed SDE, or of its sources; empty without an SDE."""
    root = os.environ.get("SDE_INSTALL")
    return of_sde(sorted(Path(root).rglob(f"bf_rt_*_{chip}.json"))) if root else {}


@pytest.mark.parametrize("target", CHIPS)
def test_it_sets_what_the_plan_says(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    chip = CHIPS[target]
    network, plan, text = planned(target, ranks=3, nodes=2, replicas=2, channels=2)
    tables, _ = run(text, schemas_of(chip), chip)
    peers, shadows = port_peers(network, "tor0")
    ports = tables["port.port"].entries
    assert {port for port, _ in ports} == set(peers)
    for settings in ports.values():
        assert settings[b"TX_PFC_EN_MAP"] == settings[b"RX_PFC_EN_MAP"] == 8
        assert settings[b"PORT_ENABLE"] is True
        assert settings[b"TX_MTU"] == 9018
    pools = tables[f"{chip}.tm.pool.cfg"].entries
    sizes = {pool: values[b"size_cells"] for (pool, _), values in pools.items()}
    assert sizes == {
        "IG_APP_POOL_1": plan.ingress_pool,
        "IG_SKID_POOL": plan.skid_pool,
        "EG_APP_POOL_1": plan.egress_pool,
    }
    groups = tables[f"{chip}.tm.ppg.cfg"].entries
    assert len(groups) == len(peers) - len(shadows)
    assert {values[b"dev_port"] for values in groups.values()} == set(peers) - shadows
    for (_, pipe), values in groups.items():
        assert pipe == values[b"dev_port"] // 128
        assert (values[b"icos_0"], values[b"pfc_enable"]) == (True, True)
        limit = tables[f"{chip}.tm.port.buffer"].entries[(values[b"dev_port"], None)]
        assert limit[b"skid_limit_cells"] == values[b"pfc_skid_max_cells"]
    queues = tables[f"{chip}.tm.queue.buffer"].entries
    cells = {queue.port.device_port: queue.cells for queue in plan.queues}
    for port, room in cells.items():
        place = (port // 4, 8 * (port % 4), port // 128)
        assert queues[place][b"pool_max_cells"] == room
        assert tables[f"{chip}.tm.queue.cfg"].entries[place][b"pfc_cos"] == 3
        control = tables[f"{chip}.tm.port.flowcontrol"].entries[(port, None)]
        assert control[b"cos_to_icos"] == [7, 7, 7, 0, 7, 7, 7, 7]
        assert (
            tables[f"{chip}.tm.queue.cfg"].entries[(port // 4, 8 * (port % 4), port // 128)][b"pfc_cos"] == 3
        )
    assert tables["pre.prune"].entries == {(0, None): {b"DEV_PORT": []}}
    assert "PCIe's CPU port is 192" in capsys.readouterr().out


def test_a_port_that_only_receives_training_pauses_its_peer_too() -> None:
    """On a switch with only shadow nodes, all traffic arrives by the link, and none leaves by it."""
    data = job_data(switches=2, ranks=2, nodes=1, nics=1, target="tofino")
    for number, rank in enumerate(data["dp_groups"][0]["ranks"]):
        rank |= {"switch": "tor0", "port": 60 - 4 * number}
    data["shadow_nodes"][0]["nics"][0] |= {"switch": "tor1", "port": 60}
    data["fabric"]["links"][0][0]["port"] = data["fabric"]["links"][0][1]["port"] = 8
    network = Network([of_data(Job, data)])
    switch = network.switches["tor1"]
    plan = pfc_plan(network, switch, planning.plan(network.jobs)["tor1"], 3)
    tables, _ = run(script(switch, port_peers(network, "tor1")[0], plan), schemas_of("tf1"), "tf1")
    controls = tables["tf1.tm.port.flowcontrol"].entries
    assert {port for port, _ in controls} == {8, 60}
    assert all(values[b"mode_tx"] == "PFC" for values in controls.values())
    assert set(tables["tf1.tm.queue.buffer"].entries) == {(60 // 4, 0, 0)}


def test_a_second_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, text = planned()
    again = f"{text}\n{text}"
    tables, _ = run(again, schemas_of("tf1"), "tf1")
    assert len(tables["port.port"].entries) == 5
    assert "keeps its speed" not in capsys.readouterr().out


def test_ports_that_are_there_keep_their_speed_and_are_enabled(capsys: pytest.CaptureFixture[str]) -> None:
    """As `bf_switchd` adds all ports of a model, disabled."""
    _, _, text = planned()
    slow = 'bfrt.port.port.add(DEV_PORT=128, SPEED="BF_SPEED_10G", PORT_ENABLE=False)'
    tables, _ = run(f"{slow}\n{text}", schemas_of("tf1"), "tf1")
    values = tables["port.port"].entries[128, None]
    assert (values[b"SPEED"], values[b"PORT_ENABLE"]) == ("BF_SPEED_10G", True)
    printed = capsys.readouterr().out
    assert "port 1/0 keeps its speed, BF_SPEED_10G instead of BF_SPEED_100G" in printed
    assert printed.count("keeps its speed") == 1


@pytest.mark.parametrize("target", CHIPS)
def test_names_are_those_of_the_sde(target: str) -> None:
    schemas = sde_schemas(CHIPS[target])
    if not schemas:
        pytest.skip("SDE_INSTALL names no SDE with bf_rt_*.json")
    run(planned(target, replicas=1)[2], schemas, CHIPS[target])


def test_the_recorder_refuses_what_is_not_there() -> None:
    bfrt, _ = tree(schemas_of("tf1"))
    wrong: list[Callable[[], object]] = [
        lambda: bfrt.port.port.mod(DEV_PORT=1, COLOUR=2),
        lambda: bfrt.port.port.add(DEV_PORT=1, SPEED="BF_SPEED_3G"),
        lambda: bfrt.tf1.tm.ppg.cfg.entry_with_nothing(ppg_id=1),
        lambda: bfrt.tf1.tm.port.cfg.get(port=1),
        lambda: bfrt.port.port.push(DEV_PORT=1),
    ]
    for call in wrong:
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(AttributeError):
        bfrt.tf1.tm.nothing.mod(a=1)


def test_the_watchdog_ignores_a_stuck_shadow_nodes_pfc_for_a_while() -> None:
    """With limits of 0 s, a port is stuck at the second check, and restored at the third."""
    network, plan, text = planned()
    tables, names = run(text, schemas_of("tf1"), "tf1")
    _, shadows = port_peers(network, "tor0")
    stuck, *usable = sorted(shadows)
    for queue in plan.queues:
        port = queue.port.device_port
        place = (port // 4, 8 * (port % 4), port // 128)
        waiting = 0 if port in usable else 500
        tables["tf1.tm.counter.queue"].entries[place] = {b"usage_cells": waiting}
        tables["port.port_stat"].entries[(port, None)] = {b"$FramesTransmittedAll": 10**6}

    def maps() -> dict[int, int]:
        return {port: values[b"RX_PFC_EN_MAP"] for (port, _), values in tables["port.port"].entries.items()}

    usual = maps()
    names["watchdog"](rounds=1, limit=0, restore=0)
    assert maps() == usual
    names["watchdog"](rounds=2, limit=0, restore=0)
    assert maps() == usual | {stuck: 0}
    names["watchdog"](rounds=3, limit=0, restore=0)
    assert maps() == usual
