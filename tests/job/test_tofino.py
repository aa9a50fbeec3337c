"""Jobs on a Tofino: front-panel names, device ports, speed and FEC, each fault with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job.files import JobError, read_job, read_jobs
from checkmate.job.schema import Job, PanelPort
from checkmate.job.tofino import chips
from checkmate.job.tofino.ports import FEC, names, port_settings, resolve
from checkmate.job.validation import of_data
from testbed.jobs import job_data, tofino_job_data
from tests.support.job_files import edited, faults, write

few = settings(max_examples=40)
ODD, EVEN, FULL = "wedge100bf-32x-odd", "wedge100bf-32x-even", "wedge100bf-65x"


@pytest.mark.parametrize("board", chips.FRONT_PANELS)
def test_a_front_panel_has_each_device_port_once(board: str) -> None:
    ports = chips.front_panel(board)
    chip = chips.CHIPS["tofino"]
    assert len(ports) == len(set(ports.values())) == 4 * len(chips.FRONT_PANELS[board])
    assert all(chips.use(chip, port) == "front panel" for port in ports.values())
    assert {chips.pipe_of(port) for port in ports.values()} == set(range(4 if board == FULL else 2))


def test_front_panels_are_as_switches_show_them() -> None:
    """Rows of `pm show` that owners of such switches have published."""
    odd, even = chips.front_panel(ODD), chips.front_panel(EVEN)
    ports = {"1/0": 128, "2/0": 136, "8/0": 184, "9/0": 60, "16/0": 4, "17/0": 0, "24/0": 56, "25/0": 188}
    ports |= {"28/0": 164, "29/0": 148, "30/0": 156, "31/0": 132, "32/0": 140}
    assert {name: odd[name] for name in ports} == ports
    assert [even[name] for name in ("1/0", "1/3", "2/0", "3/0")] == [132, 135, 140, 148]


def test_the_64_port_front_panel_is_as_its_sources_say() -> None:
    """Connectors 1, 32, 33, 41, 49, 57 lead to MAC blocks 31, 0, 40, 32, 56, 48; pipes 0 and 2 run down."""
    full = chips.front_panel(FULL)
    ports = {
        "1/0": 188,
        "16/0": 128,
        "17/0": 0,
        "32/0": 60,
        "33/0": 284,
        "41/0": 316,
        "49/0": 416,
        "57/0": 384,
    }
    assert {name: full[name] for name in ports} == ports


@given(st.sampled_from(["tofino", "tofino2"]), st.integers(0, 511))
@few
def test_every_device_port_has_one_use(target: str, port: int) -> None:
    chip = chips.CHIPS[target]
    recirculates = port % 128 in chip.recirculation and port not in chip.cpu_ports
    assert (chips.use(chip, port) == "recirculation") == recirculates
    assert (chips.use(chip, port) == "CPU") == (port in chip.cpu_ports)


def test_names_become_device_ports(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, tofino_job_data()))
    assert [rank.port for rank in job.dp_groups[0].ranks] == [128, 136, 144]
    assert [nic.port for nic in job.shadow_nodes[0].nics] == [152, 160]
    (switch,) = job.fabric.switches
    assert switch.packet_port == 192
    assert port_settings(switch, 136).name == "2/0"


def test_names_stand_in_a_fabric_of_its_own_too(tmp_path: Path) -> None:
    data = tofino_job_data()
    write(tmp_path, data["fabric"], "fabric.yaml")
    job = read_job(write(tmp_path, {**data, "fabric": "fabric.yaml"}))
    assert job.dp_groups[0].ranks[1].port == 136
    data["fabric"]["switches"][0]["ports"] = {"2/0": {"speed": "400G"}}
    fabric = write(tmp_path, data["fabric"], "fabric.yaml")
    with pytest.raises(JobError) as excinfo:
        read_job(tmp_path / "job.yaml")
    (fault,) = excinfo.value.faults
    assert (fault.file, fault.path) == (fabric, "switches[0].ports.2/0.speed")


def test_links_may_be_named(tmp_path: Path) -> None:
    data = tofino_job_data()
    spine = {**data["fabric"]["switches"][0], "name": "spine", "address": "127.0.0.1:9700"}
    spine["stub"] = {"ip": "10.255.0.99", "mac": "02:00:00:fe:00:99", "port": 7400}
    data["fabric"]["switches"].append(spine)
    data["fabric"]["links"] = [[{"switch": "tor0", "port": "32/0"}, {"switch": "spine", "port": "1/0"}]]
    (link,) = read_job(write(tmp_path, data)).fabric.links
    assert [end.port for end in link] == [140, 128]


def test_a_switch_may_have_a_map_of_its_own(tmp_path: Path) -> None:
    data = tofino_job_data()
    data["fabric"]["switches"][0]["front_panel"] = None
    data["fabric"]["switches"][0]["ports"] = {f"{n}/0": 4 * n for n in range(1, 6)}
    data["fabric"]["switches"][0]["ports"]["2/0"] = {"device_port": 60, "speed": "40G", "cable": 30}
    job = read_job(write(tmp_path, data))
    assert [rank.port for rank in job.dp_groups[0].ranks] == [4, 60, 12]
    settings = port_settings(job.fabric.switches[0], 60)
    assert (settings.name, settings.speed, settings.fec, settings.cable) == ("2/0", "40G", "none", 30.0)
    assert port_settings(job.fabric.switches[0], 4).fec == "rs"


@pytest.mark.parametrize(
    ("change", "value", "path", "message"),
    [
        ("dp_groups.0.ranks.1.port", "33/0", "dp_groups[0].ranks[1].port", "its ports are 1/0 to 32/3"),
        ("dp_groups.0.ranks.1.port", "1/0", "dp_groups[0].ranks[1].port", "tor0 128 is taken already"),
        ("dp_groups.0.ranks.1.port", 128, "dp_groups[0].ranks[1].port", "tor0 128 is taken already"),
        ("dp_groups.0.ranks.1.port", 68, "dp_groups[0].ranks[1].port", "a recirculation port"),
        ("dp_groups.0.ranks.1.port", 192, "dp_groups[0].ranks[1].port", "the CPU port"),
        ("dp_groups.0.ranks.1.port", 100, "dp_groups[0].ranks[1].port", "does not exist"),
        ("dp_groups.0.ranks.1.port", 300, "dp_groups[0].ranks[1].port", "not on the front panel"),
        ("dp_groups.0.ranks.1.port", "2/1", "dp_groups[0].ranks[1].port", "cannot begin at 2/1"),
        ("dp_groups.0.ranks.1.switch", "torx", "dp_groups[0].ranks[1].switch", "which has tor0"),
        ("fabric.switches.0.front_panel", None, "shadow_nodes[0].nics[1].port", "the device port of '5/0'"),
        ("fabric.switches.0.front_panel", "mine", "fabric.switches[0].front_panel", FULL),
        ("fabric.switches.0.front_panel", "mine", "dp_groups[0].ranks[0].port", "cannot be checked while"),
        ("fabric.switches.0.cpu_port", 510, "fabric.switches[0].cpu_port", "192, 320, 64"),
        ("fabric.switches.0.speed", "400G", "fabric.switches[0].speed", "tofino has no 400G"),
        ("fabric.switches.0.fec", "firecode", "fabric.switches[0].fec", "a 100G port's FEC is rs or none"),
        ("fabric.switches.0.ports", {"a": 1}, "fabric.switches[0].ports.a", 'such as "1/0"'),
        ("fabric.switches.0.ports", {"1/0": 70}, "fabric.switches[0].ports.1/0", "a recirculation port"),
        (
            "fabric.switches.0.ports",
            {"40/0": {"fec": "rs"}},
            "fabric.switches[0].ports.40/0",
            "nor does front_panel",
        ),
        (
            "fabric.switches.0.ports",
            {"1/0": 4, "2/0": 4},
            "fabric.switches[0].ports.2/0",
            "4 is already",
        ),
        ("fabric.switches.0.target", "tofino2", "fabric.switches[0].front_panel", "not a tofino2"),
        ("fabric.switches.0.target", "bmv2", "fabric.switches[0].front_panel", "is only for Tofinos"),
        ("fabric.switches.0.target", "bmv2", "dp_groups[0].ranks[0].port", "must be a number from 0 to 509"),
        ("fabric.switches.0.pfc", {"watchdog": 10}, "fabric.switches[0].pfc.watchdog", "80"),
        ("fabric.switches.0.cable", 0, "fabric.switches[0].cable", "must be more than 0, not 0"),
        ("tag", {"priority": 0}, "tag.priority", "must be from 1 to 7, not 0"),
    ],
)
def test_a_fault_is_placed_and_says_what_would_be_right(
    tmp_path: Path, change: str, value: Any, path: str, message: str
) -> None:
    messages = faults(tmp_path, edited(tofino_job_data(), change, value))
    assert path in messages, messages
    assert message in messages[path]


def test_lanes_of_one_connector_are_not_used_twice(tmp_path: Path) -> None:
    data = tofino_job_data()
    data["dp_groups"][0]["ranks"][1]["port"] = "1/2"
    data["fabric"]["switches"][0]["ports"] = {"1/2": {"speed": "50G"}}
    messages = faults(tmp_path, data)
    assert messages == {"dp_groups[0].ranks[1].port": "1/2 at 50G shares a lane with device port 128"}
    data["fabric"]["switches"][0]["ports"]["1/0"] = {"speed": "50G"}
    assert read_job(write(tmp_path, data)).dp_groups[0].ranks[1].port == 130


def test_one_fault_hides_no_other(tmp_path: Path) -> None:
    data = edited(tofino_job_data(), "dp_groups.0.ranks.1.port", "77/0")
    data["channels"] = 0
    data["fabric"]["switches"][0]["speed"] = "400G"
    assert set(faults(tmp_path, data)) == {
        "dp_groups[0].ranks[1].port",
        "channels",
        "fabric.switches[0].speed",
    }


def test_jobs_that_describe_a_switch_differently_are_refused(tmp_path: Path) -> None:
    second = edited(tofino_job_data("two", number=1), "fabric.switches.0.cable", 30)
    with pytest.raises(JobError, match=r"describes switch 'tor0' differently \(cable\)"):
        read_jobs([write(tmp_path, tofino_job_data(), "a.yaml"), write(tmp_path, second, "b.yaml")])


@pytest.mark.parametrize(
    ("first_change", "second_change", "differing"),
    [
        ({}, {"cpu_port": 192}, None),
        ({}, {"fec": "rs"}, None),
        ({}, {"pfc": {"cells": 180 * 1024}}, None),
        ({}, {"ports": {"1/0": {"device_port": 128, "speed": "100G", "fec": "rs", "cable": 5}}}, None),
        ({"cable": 3}, {"cable": 3, "ports": {"1/0": {"cable": 3}}}, None),
        ({}, {"cpu_port": 64}, "cpu_port"),
        ({}, {"fec": "none"}, "fec"),
        ({}, {"ports": {"1/0": {"cable": 30}}}, "ports"),
        ({"fec": "none"}, {"fec": "none", "ports": {"1/0": {"speed": "100G"}}}, "ports"),
    ],
)
def test_a_default_that_is_written_out_is_no_difference(
    tmp_path: Path, first_change: dict[str, Any], second_change: dict[str, Any], differing: str | None
) -> None:
    first, second = tofino_job_data(), tofino_job_data("two", number=1)
    first["fabric"]["switches"][0] |= first_change
    second["fabric"]["switches"][0] |= second_change
    files = [write(tmp_path, first, "a.yaml"), write(tmp_path, second, "b.yaml")]
    if differing is None:
        assert len(read_jobs(files)) == 2
    else:
        with pytest.raises(JobError, match=rf"describes switch 'tor0' differently \({differing}\)"):
            read_jobs(files)


def test_the_cpu_port_of_other_targets_may_be_written_out(tmp_path: Path) -> None:
    first, second = job_data(), job_data("two", number=1)
    second["fabric"]["switches"][0]["cpu_port"] = 510
    assert len(read_jobs([write(tmp_path, first, "a.yaml"), write(tmp_path, second, "b.yaml")])) == 2


KEYS = ["fabric", "switches", "name", "target", "ports", "dp_groups", "ranks", "port", "switch"]
junk = st.recursive(
    st.none() | st.integers(-1, 600) | st.sampled_from(["1/0", "tor0", "tofino", "100G", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(junk)
@few
def test_no_data_breaks_the_naming_of_ports(data: Any) -> None:
    for fault in resolve(data):
        assert fault.path[-1] == "port"


@given(st.data())
@few
def test_any_port_of_any_board_is_read_back_by_its_name(data: st.DataObject) -> None:
    board = data.draw(st.sampled_from(sorted(chips.FRONT_PANELS)))
    name = data.draw(st.sampled_from(sorted(chips.front_panel(board))))
    speed = data.draw(st.sampled_from(["10G", "25G"]))
    raw = tofino_job_data(board=board)
    raw["fabric"]["switches"][0] |= {"speed": speed, "ports": {name: {"fec": FEC[speed][-1]}}}
    raw["dp_groups"][0]["ranks"][0]["port"] = name
    assert resolve(raw) == []
    switch = of_data(Job, raw).fabric.switches[0]
    port = raw["dp_groups"][0]["ranks"][0]["port"]
    assert names(board, {name: PanelPort()})[name] == port
    settings = port_settings(switch, port)
    assert (settings.name, settings.speed, settings.fec) == (name, speed, FEC[speed][-1])


def test_a_job_without_tofino_has_the_port_of_its_program() -> None:
    assert of_data(Job, job_data()).fabric.switches[0].packet_port == 510
