"""Job files: valid ones are read, and all faults are reported at once, with their location."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job import checks, conflicts, following, yaml_lines
from checkmate.job.files import JobError, read_job, read_jobs, read_set
from checkmate.job.following import ABSENCE_SECONDS, Absences, FaultLog, JobFiles, job_files
from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.job.yaml_lines import Document, Located
from testbed.jobs import job_data
from tests.support.job_files import edited, write
from tests.support.jobs import lists_of_jobs

RIGHT = job_data(nodes=2, channels=2)


def faults(*files: Path) -> dict[str, str]:
    with pytest.raises(JobError) as excinfo:
        read_jobs(files)
    return {fault.path: fault.message for fault in excinfo.value.faults}


def test_a_right_job_is_read(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, job_data(channels=2, nodes=2, replicas=2)))
    assert job.channels == 2
    assert job.shards(0) == 2
    assert [job.holder(0, 1, i).id for i in (1, 2)] == [1, 0]


def test_fabric_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    data = job_data()
    write(tmp_path, data["fabric"], "fabric.yaml")
    data["fabric"] = "fabric.yaml"
    file = write(tmp_path, data)
    assert read_job(file).fabric.switches[0].name == "tor0"
    assert job_files([tmp_path]) == [file]


def test_a_fault_in_the_fabric_file_is_placed_there(tmp_path: Path) -> None:
    data = job_data()
    data["fabric"]["switches"][0]["colour"] = "red"
    fabric = write(tmp_path, data["fabric"], "fabric.yaml")
    data["fabric"] = "fabric.yaml"
    with pytest.raises(JobError) as excinfo:
        read_job(write(tmp_path, data))
    (fault,) = excinfo.value.faults
    assert fault.file == fabric
    assert fault.path == "switches[0].colour"
    assert "unknown key" in fault.message
    assert fabric.read_text().splitlines()[fault.line - 1].strip().startswith("colour")


@pytest.mark.parametrize(
    ("change", "value", "path", "message"),
    [
        ("colour", 1, "colour", "unknown key"),
        ("collective", "gloo", "collective", "must be 'ring', 'tree' or 'nccl', not 'gloo'"),
        ("channels", 9, "channels", "must be from 1 to 8, not 9"),
        ("channels", "two", "channels", "must be a whole number from 1 to 8, not 'two'"),
        ("channels", 1.5, "channels", "must be a whole number from 1 to 8, not 1.5"),
        (
            "dp_groups/0/ranks/1/rank",
            "a",
            "dp_groups[0].ranks[1].rank",
            "must be a whole number from 0 to 65535, not 'a'",
        ),
        (
            "fabric/links",
            [[{"switch": "tor0", "port": 1.5}, {"switch": "tor0", "port": 9}]],
            "fabric.links[0][0].port",
            "must be a whole number from 0 to 509, not 1.5",
        ),
        (
            "fabric/switches/0/ports",
            {"1/0": {"device_port": 1.5}},
            "fabric.switches[0].ports.1/0.device_port",
            "must be a whole",
        ),
        (
            "fabric/switches/0/target",
            "tofino3",
            "fabric.switches[0].target",
            "must be 'softswitch', 'bmv2', 'tofino' or 'tofino2', not 'tofino3'",
        ),
        ("dp_groups/0/shadow_nodes", ["a"], "dp_groups[0].shadow_nodes[0]", "whole number from 0 to 65535"),
        ("job", ..., "job", "missing"),
        ("job", "a b", "job", "letters, digits"),
        ("tag", {"dscp_bit": 3}, "tag.dscp_bit", "one of the six bits"),
        ("dp_groups", [], "dp_groups", "at least 1"),
        ("dp_groups/0/ranks", [], "dp_groups[0].ranks", "at least 2"),
        (
            "dp_groups/0/ranks/1/ip",
            "10.0.0.1",
            "dp_groups[0].ranks[1].ip",
            "taken already by dp_groups[0].ranks[0]",
        ),
        ("dp_groups/0/ranks/1/ip", "10.0.0", "dp_groups[0].ranks[1].ip", "such as 10.0.0.1"),
        ("dp_groups/0/ranks/1/mac", "02:00:00:00:00:00", "dp_groups[0].ranks[1].mac", "taken already"),
        ("dp_groups/0/ranks/1/mac", "01:00:00:00:00:00", "dp_groups[0].ranks[1].mac", "unicast"),
        ("dp_groups/0/ranks/1/rank", 0, "dp_groups[0].ranks[1].rank", "rank number 0 is taken"),
        ("dp_groups/0/ranks/1/port", 1, "dp_groups[0].ranks[1].port", "switch port tor0 1 is taken"),
        ("dp_groups/0/ranks/1/switch", "torx", "dp_groups[0].ranks[1].switch", "which has tor0"),
        ("dp_groups/0/shadow_nodes", [7], "dp_groups[0].shadow_nodes[0]", "its ids are 0, 1"),
        ("dp_groups/0/shadow_nodes", [1, 1], "dp_groups[0].shadow_nodes[1]", "listed twice"),
        ("shadow_nodes/1/id", 0, "shadow_nodes[1].id", "shadow node id 0 is taken"),
        ("shadow_nodes/1/mgmt", "nowhere", "shadow_nodes[1].mgmt", "host:port"),
        ("dp_groups/0/ranks/1/mgmt", "!!! not a host", "dp_groups[0].ranks[1].mgmt", "a host name or an IP"),
        ("dp_groups/0/ranks/1/mgmt", "10.0.0.300", "dp_groups[0].ranks[1].mgmt", "a host name or an IP"),
        ("dp_groups/0/ranks/1/mgmt", "10.0.0.2:7000", "dp_groups[0].ranks[1].mgmt", "a host name or an IP"),
        ("dp_groups/0/ranks/1/mgmt", "!!! not a host", "dp_groups[0].ranks[1].mgmt", "a host name or an IP"),
        ("dp_groups/0/ranks/1/mgmt", "10.0.0.300", "dp_groups[0].ranks[1].mgmt", "a host name or an IP"),
        ("dp_groups/0/ranks/1/mgmt", "10.0.0.2:7000", "dp_groups[0].ranks[1].mgmt", "a host name or an IP"),
        (
            "shadow_nodes/0/nics/0/ip",
            "10.255.0.1",
            "shadow_nodes[0].nics[0].ip",
            "taken already by fabric.switches[0].stub",
        ),
        ("dp_groups/0/ranks/1/addresses", "10.0.0.9", "dp_groups[0].ranks[1].addresses", "must be a list"),
        (
            "dp_groups/0/ranks/1/addresses",
            ["10.0.0.9", "224.0.0.9"],
            "dp_groups[0].ranks[1].addresses[1]",
            "must be a host's IPv4 address",
        ),
        (
            "dp_groups/0/ranks/1/addresses",
            ["10.0.0.9", "10.0.0.9"],
            "dp_groups[0].ranks[1].addresses[1]",
            "10.0.0.9 is taken already by dp_groups[0].ranks[1].addresses[0]",
        ),
        (
            "dp_groups/0/ranks/0/addresses",
            ["10.0.0.2"],
            "dp_groups[0].ranks[0].addresses[0]",
            "10.0.0.2 is taken already by dp_groups[0].ranks[1].ip",
        ),
        (
            "shadow_nodes/0/nics/0/addresses",
            ["10.255.0.1"],
            "shadow_nodes[0].nics[0].addresses[0]",
            "10.255.0.1 is taken already by fabric.switches[0].stub.ip",
        ),
        ("replicas", 3, "replicas", "3 replicas need as many shadow nodes"),
        ("fabric/switches/0/cpu_port", 64, "fabric.switches[0].cpu_port", "510"),
        (
            "fabric/switches/0/target",
            "asic",
            "fabric.switches[0].target",
            "'softswitch', 'bmv2', 'tofino' or",
        ),
    ],
)
def test_a_fault_is_placed_and_says_what_would_be_right(
    tmp_path: Path, change: str, value: Any, path: str, message: str
) -> None:
    messages = faults(write(tmp_path, edited(RIGHT, change, value)))
    assert path in messages, messages
    assert message in messages[path]


def test_all_faults_are_said_at_once(tmp_path: Path) -> None:
    data = edited(RIGHT, "dp_groups/0/ranks/1/ip", "10.0.0.1")
    data["colour"] = 1
    data["channels"] = 0
    data["shadow_nodes"][1]["id"] = 0
    messages = faults(write(tmp_path, data))
    assert set(messages) == {"dp_groups[0].ranks[1].ip", "colour", "channels", "shadow_nodes[1].id"}


def test_a_faulty_address_hides_no_other(tmp_path: Path) -> None:
    data = edited(RIGHT, "dp_groups/0/ranks/1/addresses", ["10.0.0.1", "224.0.0.9", 7, "10.0.0.2"])
    messages = faults(write(tmp_path, data))
    assert set(messages) == {f"dp_groups[0].ranks[1].addresses[{index}]" for index in range(4)}


def test_hosts_that_no_link_joins_are_refused(tmp_path: Path) -> None:
    data = job_data(switches=2)
    data["fabric"]["links"] = []
    messages = faults(write(tmp_path, data))
    assert (
        "no path of links from switch 'tor1' to the first rank's" in messages["dp_groups[0].ranks[1].switch"]
    )


def test_a_misspelt_switch_of_the_first_rank_is_the_only_fault(tmp_path: Path) -> None:
    messages = faults(write(tmp_path, edited(RIGHT, "dp_groups/0/ranks/0/switch", "torr")))
    assert set(messages) == {"dp_groups[0].ranks[0].switch"}


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"collective": "tree", "channels": 5}, "channels", "both together 8 at most: 1 to 4"),
        ({"tree_bytes": 9}, "tree_bytes", "is for collective: tree, and this is ring: remove it"),
        ({"collective": "tree", "tree_bytes": 0}, "tree_bytes", "must be from 1 to 2147483648, not 0"),
        ({"collective": "tree", "lossless": False}, "lossless", "with collective: tree, the network must be"),
        ({"collective": "nccl", "lossless": False}, "lossless", "with collective: nccl, the network must be"),
    ],
)
def test_what_a_collective_cannot_do_is_told(
    tmp_path: Path, change: dict[str, Any], path: str, words: str
) -> None:
    messages = faults(write(tmp_path, {**RIGHT, **change}))
    assert words in messages.pop(path)
    assert not messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job: [", "a '[' or '{' is not closed correctly"),
        ("- a\n", "is a list; it must be a mapping of keys such as job: and fabric:"),
        ("hello", "is a single value; it must be a mapping"),
        ("job: a\njob: b\n", "the key 'job' is given twice, first in line 1; remove one"),
        ("", "is empty; it must be a mapping of keys such as job: and fabric:"),
        ("dp_groups:\n\t- a\n", "has a tab where YAML accepts only spaces: indent with spaces"),
        ("job: a\n---\njob: b\n", "has a second document; keep one"),
        ("job: a\n...\njob: b\n", "remove the line '...'"),
        ("job: *x\n", "the alias *x has no anchor &x before it"),
        ("job: &a 1\nb: &a 2\n", "this anchor is given already in line 1; choose another name"),
        ("job: a\n  channels: 2\n", "the indentation is wrong"),
        ("dp_groups:\n  - a: 1\n - a: 2\n", "is not indented like the lines that it belongs to"),
        ("job: @a\n", "a text that begins with '@' needs quotes"),
        ("job: *\n", "a text that begins with '*', '&' or '!' needs quotes"),
        ("tag: {a: 3\nb: 1\n", "the '{' in line 1 is not closed here: ',' or '}' is missing"),
        ('job: "a\nb: 1\n', "the quote in line 1 is not closed"),
        ("job: a\nchannels\n", "lacks a ':' after the key"),
        ("job: - a\n", "has a '? ' or '- ' in a wrong place"),
        ('job: "a\\q"\n', "use single quotes"),
        ("job: !foo a\n", "has the tag !foo, which these files do not use; remove it"),
        ("job: !!python/tuple [a]\n", "has the tag !python/tuple"),
        ("? [a]\n: 1\n", "has a list or a mapping as a key"),
        ("<<: 3\n", "the key << needs an alias of a mapping"),
        ("%YAML 3.0\n---\njob: a\n", "remove the line %YAML"),
        ("job: a\x07b\n", "has the control character U+0007; remove it"),
        ("job: |3x\n a\n", "is not valid YAML: expected chomping"),
        ("job: 2020-13-45", "can't be read as a date"),
    ],
)
def test_what_is_no_job_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (fault_message,) = faults(write(tmp_path, text)).values()
    assert message in fault_message


def test_a_fabric_file_given_as_a_job_is_called_one(tmp_path: Path) -> None:
    messages = faults(write(tmp_path, job_data()["fabric"], "fabric.yaml"))
    assert list(messages) == ["(file)"]
    assert messages["(file)"].startswith("this is a fabric file; pass the job file")


def test_a_fabric_that_is_no_path_is_refused(tmp_path: Path) -> None:
    messages = faults(write(tmp_path, 'job: a\nfabric: "a\\0b"'))
    assert messages == {
        "fabric": "must be the path of a file",
        "dp_groups": "is missing; list the job's DP groups, or give a mesh (`checkmate docs job`)",
        "shadow_nodes": "is missing",
    }


def test_merge_keys_are_yaml(tmp_path: Path) -> None:
    text = yaml.safe_dump({**job_data(), "channels": 2})
    text = text.replace("channels: 2", "x: &x {channels: 2}\n<<: *x")
    messages = faults(write(tmp_path, text))
    assert set(messages) == {"x"}  # an unknown key, without a fault about the merge


def test_half_a_tls_pair_is_refused(tmp_path: Path) -> None:
    data = job_data()
    data["fabric"]["switches"][0]["tls"] = {"ca": "ca.pem", "cert": "client.pem"}
    messages = faults(write(tmp_path, data))
    assert "give both, or neither" in messages["fabric.switches[0].tls"]


def test_tls_files_are_named_from_the_jobs_folder(tmp_path: Path) -> None:
    data = job_data()
    data["fabric"]["switches"][0]["tls"] = {"ca": "ca.pem"}
    tls = read_job(write(tmp_path, data)).fabric.switches[0].tls
    assert tls is not None
    assert tls.ca == tmp_path / "ca.pem"


def test_an_older_job_file_is_told_what_has_replaced_its_tls_files(tmp_path: Path) -> None:
    data = {**job_data(), "mgmt_tls": {"ca": "ca.pem", "cert": "host.pem", "key": "host.key"}}
    messages = faults(write(tmp_path, data))
    assert set(messages) == {"mgmt_tls"}
    assert "replaced by keys: remove it, run `checkmate keys FILE`" in messages["mgmt_tls"]


def test_with_nccl_ranks_are_in_ascending_order(tmp_path: Path) -> None:
    data = job_data(ranks=3)
    first, second, _ = data["dp_groups"][0]["ranks"]
    first["rank"], second["rank"] = 1, 0
    assert read_job(write(tmp_path, data)).collective == "ring"
    (message,) = faults(write(tmp_path, {**data, "collective": "nccl"})).values()
    assert message.startswith("rank 0 follows rank 1; with collective: nccl, list the ranks of a DP group in")


def test_with_nccl_no_two_ranks_of_a_dp_group_share_a_host(tmp_path: Path) -> None:
    data = job_data(groups=2, nodes=2)
    for group in data["dp_groups"]:
        for rank, host in zip(group["ranks"], ("gpu0", "gpu1", "gpu0"), strict=True):
            rank["mgmt"] = host
    assert read_job(write(tmp_path, data)).collective == "ring"
    messages = faults(write(tmp_path, {**data, "collective": "nccl"}))
    assert set(messages) == {f"dp_groups[{group}].ranks[2].mgmt" for group in (0, 1)}
    message = messages["dp_groups[1].ranks[2].mgmt"]
    assert message.startswith(
        "gpu0 is the host of dp_groups[1].ranks[0] already; with collective: nccl, each"
    )


def test_a_link_of_one_job_is_no_host_port_of_another(tmp_path: Path) -> None:
    first, two = job_data("one", switches=2), job_data("two", switches=2, number=1)
    two["dp_groups"][0]["ranks"][0]["port"] = 400
    two["fabric"]["links"] = []
    for part in (*two["dp_groups"][0]["ranks"], *two["shadow_nodes"][0]["nics"]):
        part["switch"] = "tor0"
        part["port"] = part["port"] if part["port"] == 400 else 150 + part.get("rank", 40)
    two["shadow_nodes"][0]["nics"].pop()
    messages = faults(write(tmp_path, first, "1.yaml"), write(tmp_path, two, "2.yaml"))
    assert "tor0 400 is claimed already by job 'one'" in messages["dp_groups[0].ranks[0].port"]


def test_a_switch_has_one_name(tmp_path: Path) -> None:
    second = job_data("two", number=1)
    second["fabric"]["switches"][0]["name"] = "elsewhere"
    for part in (*second["dp_groups"][0]["ranks"], *second["shadow_nodes"][0]["nics"]):
        part["switch"] = "elsewhere"
    messages = faults(write(tmp_path, job_data("one"), "1.yaml"), write(tmp_path, second, "2.yaml"))
    assert "a switch has one name" in messages["fabric.switches[0].name"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    (message,) = faults(tmp_path / "none.yaml").values()
    assert "cannot be read" in message


def test_a_line_number_is_the_one_of_the_key(tmp_path: Path) -> None:
    file = write(tmp_path, edited(RIGHT, "dp_groups/0/ranks/1/ip", "10.0.0.1"))
    with pytest.raises(JobError) as excinfo:
        read_job(file)
    (fault,) = excinfo.value.faults
    assert file.read_text().splitlines()[fault.line - 1].strip() == "ip: 10.0.0.1"


def test_jobs_that_claim_the_same_thing_are_refused_by_name(tmp_path: Path) -> None:
    first = write(tmp_path, job_data("one"), "one.yaml")
    second = job_data("two", number=1)
    second["shadow_nodes"][0]["nics"][0] = job_data("one")["shadow_nodes"][0]["nics"][0]
    messages = faults(first, write(tmp_path, second, "two.yaml"))
    assert set(messages) == {f"shadow_nodes[0].nics[0].{field}" for field in ("ip", "mac", "port")}
    assert (
        "is claimed already by job 'one' (shadow_nodes[0].nics[0].ip)"
        in messages["shadow_nodes[0].nics[0].ip"]
    )


def test_jobs_that_describe_a_switch_differently_are_refused(tmp_path: Path) -> None:
    second = job_data("two", number=1)
    second["fabric"]["switches"][0]["device_id"] = 2
    messages = faults(write(tmp_path, job_data("one"), "1.yaml"), write(tmp_path, second, "2.yaml"))
    assert "describes switch 'tor0' differently (device_id)" in messages["fabric.switches[0]"]


def test_a_stub_is_no_other_jobs_host(tmp_path: Path) -> None:
    second = job_data("two", number=1)
    second["fabric"]["switches"][0]["name"] = "elsewhere"
    second["fabric"]["switches"][0]["stub"]["ip"] = "10.0.0.1"
    for part in (*second["dp_groups"][0]["ranks"], *second["shadow_nodes"][0]["nics"]):
        part["switch"] = "elsewhere"
    messages = faults(write(tmp_path, job_data("one"), "1.yaml"), write(tmp_path, second, "2.yaml"))
    assert "10.0.0.1" in messages["fabric.switches[0].stub.ip"]


def test_a_further_address_is_no_other_jobs_host(tmp_path: Path) -> None:
    second = job_data("two", number=1)
    second["shadow_nodes"][0]["nics"][1]["addresses"] = ["10.1.9.9", "10.0.0.1"]
    messages = faults(write(tmp_path, job_data("one"), "1.yaml"), write(tmp_path, second, "2.yaml"))
    assert list(messages) == ["shadow_nodes[0].nics[1].addresses[1]"]
    assert "10.0.0.1 is claimed already by job 'one' (dp_groups[0].ranks[0].ip)" in messages.popitem()[1]


@given(lists_of_jobs())
@settings(max_examples=30)
def test_jobs_of_the_strategy_may_run_side_by_side(jobs: list[Job]) -> None:
    assert conflicts.between_jobs([data_of(job) for job in jobs]) == []


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value that is neither a list nor a mapping."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, (*path, key))
    else:
        yield path


def broken(data: Any, places: Iterable[tuple[Any, ...]]) -> Any:
    """Return the data with some values of the wrong type."""
    result = copy.deepcopy(data)
    for *way, last in places:
        at = result
        for part in way:
            at = at[part]
        at[last] = [["wrong"]]
    return result


def fault_paths(raw: Any) -> list[tuple[Any, ...]]:
    return [fault.path for fault in [*checks.structure(raw)[1], *checks.within_job(raw)]]


@given(st.data())
@settings(max_examples=120)
def test_no_fault_hides_another_or_makes_one_up(data: st.DataObject) -> None:
    right = job_data(groups=2, nodes=2, switches=2, channels=2, replicas=2)
    right["dp_groups"][1]["shadow_nodes"] = [0, 1]
    places = data.draw(st.sets(st.sampled_from(list(leaves(right))), min_size=1, max_size=12))
    assert sorted(fault_paths(broken(right, places)), key=str) == sorted(places, key=str)


def test_a_link_to_nowhere_leaves_nobody_unreachable(tmp_path: Path) -> None:
    """Consequences of a fault are not reported beside it."""
    data = job_data(switches=2)
    data["fabric"]["links"][0][1]["switch"] = "tor9"
    assert set(faults(write(tmp_path, data))) == {"fabric.links[0][1].switch"}


def test_a_copy_of_a_job_file_is_one_fault_that_names_it(tmp_path: Path) -> None:
    first, copied = (write(tmp_path, job_data(nodes=2), name) for name in ("a.yaml", "b.yaml"))
    with pytest.raises(JobError) as excinfo:
        read_jobs([first, copied])
    (fault,) = excinfo.value.faults
    assert (fault.file, fault.path) == (copied, "job")
    assert fault.message.startswith(f"{first} has a job 'demo', too: remove one of both if it is a copy")


def test_what_a_job_says_twice_is_no_fault_between_jobs() -> None:
    """It is a fault within the job, and reported there."""
    data = job_data(switches=2)
    again, link = copy.deepcopy(data["fabric"]["switches"][0]), copy.deepcopy(data["fabric"]["links"][0])
    again["device_id"], link[1]["port"] = 7, 450
    data["fabric"]["switches"] += [again, {**data["fabric"]["switches"][0], "name": "tor8"}]
    data["fabric"]["links"].append(link)
    data["dp_groups"][0]["ranks"][1]["ip"] = data["dp_groups"][0]["ranks"][0]["ip"]
    assert conflicts.between_jobs([data]) == []
    assert len(checks.within_job(data)) >= 4


@given(st.data())
@settings(max_examples=60)
def test_a_broken_value_hides_no_clash_elsewhere(data: st.DataObject) -> None:
    """Two ranks with one address, port and number, and any other value broken: all faults are reported."""
    clashing = job_data(groups=2, nodes=2)
    first, second = (clashing["dp_groups"][g]["ranks"][1] for g in (0, 1))
    fields = ("ip", "mac", "port", "rank")
    second.update({field: first[field] for field in fields})
    clash = {("dp_groups", 1, "ranks", 1, field) for field in fields}
    clash_paths = {("dp_groups", g, "ranks", 1, field) for g in (0, 1) for field in (*fields, "switch")}
    other_paths = [path for path in leaves(clashing) if path not in clash_paths]
    places = data.draw(st.sets(st.sampled_from(other_paths), max_size=6))
    assert sorted(fault_paths(broken(clashing, places)), key=str) == sorted(clash | places, key=str)


@pytest.mark.parametrize(
    ("first", "second", "path", "message"),
    [
        (
            {"mgmt": "192.168.0.1:7000"},
            {"mgmt": "192.168.0.1:7001"},
            "shadow_nodes[1].mgmt",
            "mgmt address 192.168.0.1:7001 is taken already by shadow_nodes[0].mgmt",
        ),
        (
            {"mgmt": "192.168.0.1:7001"},
            {"mgmt": "192.168.0.1:7000"},
            "shadow_nodes[1].mgmt",
            "the port after mgmt's (for step records) 192.168.0.1:7001 is taken already",
        ),
        (
            {"mgmt": "192.168.0.1:7000"},
            {"mgmt": "192.168.0.2:7000", "records": "192.168.0.1:7000"},
            "shadow_nodes[1].records",
            "records address 192.168.0.1:7000 is taken already by shadow_nodes[0].mgmt",
        ),
        (
            {"mgmt": "192.168.0.1:65535"},
            {"mgmt": "192.168.0.2:65535", "records": "192.168.0.2:7"},
            "shadow_nodes[0].mgmt",
            "192.168.0.1:65536 does not exist: set records",
        ),
    ],
)
def test_each_address_of_a_shadow_node_is_its_own(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], path: str, message: str
) -> None:
    data = job_data(nodes=2)
    data["shadow_nodes"][0].update(first)
    data["shadow_nodes"][1].update(second)
    messages = faults(write(tmp_path, data))
    assert list(messages) == [path]
    assert message in messages[path]


def test_step_records_go_to_the_port_after_the_one_of_mgmt_unless_the_job_says_otherwise() -> None:
    data = job_data(nodes=2)
    data["shadow_nodes"][0]["mgmt"] = "[::1]:7000"
    data["shadow_nodes"][1]["records"] = "192.168.7.7:99"
    job = of_data(Job, data)
    assert [node.records_at for node in job.shadow_nodes] == [("::1", 7001), ("192.168.7.7", 99)]


def test_faults_of_several_files_are_said_by_file_and_line(tmp_path: Path) -> None:
    """One job cannot be parsed, one has faults, and one claims resources of the second."""
    first, two = job_data("one"), job_data("two", number=1)
    first["channels"] = 0
    first["dp_groups"][0]["ranks"][2]["ip"] = "nowhere"
    two["dp_groups"][0]["ranks"][1]["ip"] = first["dp_groups"][0]["ranks"][1]["ip"]
    files = [
        write(tmp_path, two, "z.yaml"),
        write(tmp_path, first, "a.yaml"),
        write(tmp_path, "job: [", "m.yaml"),
    ]
    with pytest.raises(JobError) as excinfo:
        read_jobs(files)
    assert [(fault.file, fault.path) for fault in excinfo.value.faults] == [
        (files[1], "channels"),
        (files[1], "dp_groups[0].ranks[1].ip"),
        (files[1], "dp_groups[0].ranks[2].ip"),
        (files[2], "(YAML)"),
    ]
    lines = [fault.line for fault in excinfo.value.faults[:3]]
    assert lines == sorted(lines)
    assert "claimed already by job 'two'" in excinfo.value.faults[1].message


def test_the_sound_files_of_a_set_are_told(tmp_path: Path) -> None:
    files = [write(tmp_path, job_data(f"job{n}", number=n), f"{n}.yaml") for n in range(3)]
    files[1].write_text("job: broken\n")
    job_set = read_set(files)
    assert [file for file, _ in job_set.sound] == [files[0], files[2]]
    assert {fault.file for fault in job_set.faults} == {files[1]}


@pytest.mark.parametrize("fabric", ["switches: [", "- a\n", None])
def test_a_fabric_that_cant_be_read_hides_nothing_in_the_job(tmp_path: Path, fabric: str | None) -> None:
    data = edited(RIGHT, "dp_groups/0/ranks/1/ip", "10.0.0.1")
    data["channels"] = 0
    data["fabric"] = "fabric.yaml"
    if fabric is not None:
        (tmp_path / "fabric.yaml").write_text(fabric)
    paths = set(faults(write(tmp_path, data)))
    assert paths == {
        "channels",
        "dp_groups[0].ranks[1].ip",
        {"switches: [": "(YAML)", "- a\n": "(top level)", None: "fabric"}[fabric],
    }


def test_a_fault_of_a_shared_fabric_file_is_said_once(tmp_path: Path) -> None:
    jobs = [job_data(f"job{n}", number=n) for n in range(2)]
    shared = jobs[0]["fabric"]
    shared["switches"][0]["colour"] = "red"
    fabric = write(tmp_path, shared, "fabric.yaml")
    files = [write(tmp_path, {**job, "fabric": "fabric.yaml"}, f"{job['job']}.yaml") for job in jobs]
    with pytest.raises(JobError) as excinfo:
        read_jobs(files)
    assert [(fault.file, fault.path) for fault in excinfo.value.faults] == [(fabric, "switches[0].colour")]


def test_a_fault_between_jobs_is_placed_in_the_fabric_file(tmp_path: Path) -> None:
    first = write(tmp_path, job_data("one"), "one.yaml")
    second_data = job_data("two", number=1)
    second_data["fabric"]["switches"][0]["device_id"] = 2
    fabric = write(tmp_path, second_data["fabric"], "fabric.yaml")
    second = write(tmp_path, {**second_data, "fabric": "fabric.yaml"}, "two.yaml")
    with pytest.raises(JobError) as excinfo:
        read_jobs([first, second])
    (fault,) = excinfo.value.faults
    assert (fault.file, fault.path) == (fabric, "switches[0]")


def served(files: JobFiles) -> list[str]:
    """Read, serve, and return the names of the jobs."""
    job_set = files.jobs_to_serve(lambda job: "")
    files.note_served(job_set)
    return sorted(job.job for job in job_set.jobs)


def test_a_file_that_is_gone_is_awaited_unless_another_has_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = write(tmp_path, job_data("a"), "a.yaml")
    files = JobFiles([tmp_path])
    assert served(files) == ["a"]
    first = first.rename(tmp_path / "moved.yaml")
    assert (served(files), caplog.messages) == (["a"], [])
    first.unlink()
    write(tmp_path, job_data("b", number=1), "b.yaml")  # others' changes don't wait
    assert files.have_changed()
    assert (served(files), len(caplog.messages)) == (["a", "b"], 1)
    assert f"{first}: gone; unless it comes back in 5 s, its job ends" in caplog.text
    assert not files.have_changed()  # nothing is parsed until a file changes, or the time is over
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + ABSENCE_SECONDS)
    assert files.have_changed()
    assert (served(files), files.have_changed(), len(caplog.messages)) == (["b"], False, 1)


def test_a_file_that_claims_what_an_awaited_one_has_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, job_data("a"), "a.yaml")
    files = JobFiles([tmp_path])
    assert served(files) == ["a"]
    file.unlink()
    second = write(tmp_path, job_data("b"), "b.yaml")  # with the same ports and addresses
    with pytest.raises(JobError, match="claimed already by job 'a'") as excinfo:
        files.jobs_to_serve(lambda job: "")
    assert {fault.file for fault in excinfo.value.faults} == {second}
    assert not files.have_changed()
    monkeypatch.setattr(following, "ABSENCE_SECONDS", 0.0)
    assert files.have_changed()
    assert served(files) == ["b"]


def test_each_file_that_is_gone_is_awaited_from_when_it_was_missed() -> None:
    first, second = Path("first"), Path("second")
    absences = Absences()
    assert absences.note([first], 10.0) == [first]
    assert absences.awaited(10.0) == [first]
    assert absences.note([first, second], 10.0 + ABSENCE_SECONDS - 1) == [second]
    assert not absences.over(10.0 + ABSENCE_SECONDS - 1)
    assert absences.over(10.0 + ABSENCE_SECONDS)
    assert absences.awaited(10.0 + ABSENCE_SECONDS) == [second]
    assert not absences.over(10.0 + ABSENCE_SECONDS)
    assert absences.note([first, second], 20.0) == []  # again and again, as the switch is away
    assert absences.awaited(20.0) == []
    assert absences.note([second], 21.0) == []
    assert absences.note([first, second], 22.0) == [first]  # it was back meanwhile


@pytest.mark.parametrize("several_owners", [False, True])
def test_a_link_to_itself_is_a_fault_of_its_own(tmp_path: Path, several_owners: bool) -> None:
    """It must not keep the other jobs of the folder from being read."""
    write(tmp_path, job_data())
    loop = tmp_path / "loop.yaml"
    loop.symlink_to("loop.yaml")
    files = job_files([tmp_path], several_owners=several_owners)
    assert sorted(file.name for file in files) == ["job.yaml", "loop.yaml"]
    with pytest.raises(JobError, match="Too many levels of symbolic links") as excinfo:
        JobFiles([tmp_path]).read().require()
    assert [fault.file for fault in excinfo.value.faults] == [loop]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("keys", "a\0b", "must be the path of a file"),
        ("keys", "../a\0b", "must be the path of a file"),
        ("keys", "x" * 1000, "must be the path of a file"),
        ("dp_groups.0.ranks.0.ip", "127.0.0.1", "own loopback, which no switch"),
        ("fabric.switches.0.address", "10.0.0.1:\u0669\u0665\u0665\u0669", "must be host:port"),
        ("shadow_nodes.0.mgmt", "\u0661\u0660.0.0.1:7000", "must be host:port|must be a host name"),
    ],
)
def test_values_that_nothing_can_have_are_faults(tmp_path: Path, path: str, value: str, words: str) -> None:
    data: Any = job_data()
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    here = data
    for part in parents:
        here = here[part]
    here[last] = value
    messages = faults(write(tmp_path, data))
    assert any(re.search(words, message) for message in messages.values()), messages


def test_a_files_name_forges_no_line_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "a\nb\x1b[2J.yaml").write_text("job: [")
    with pytest.raises(JobError) as excinfo:
        JobFiles([tmp_path]).read().require()
    (line,) = str(excinfo.value).splitlines()
    assert r"a\nb\x1b[2J.yaml:1: (YAML)" in line


def test_paths_have_no_way_up_unless_a_link_needs_it(tmp_path: Path) -> None:
    for folder in ("jobs", "real/inner"):
        (tmp_path / folder).mkdir(parents=True)
    data = {**job_data(), "keys": "../keys"}
    job = read_job(write(tmp_path / "jobs", data))
    assert job.keys == tmp_path / "keys"
    (tmp_path / "link").symlink_to("real/inner")
    write(tmp_path / "real" / "inner", data)
    assert read_job(tmp_path / "link" / "job.yaml").keys == tmp_path / "link" / ".." / "keys"
    faulty = write(tmp_path / "jobs", {**data, "fabric": "../fabric.yaml"})
    write(tmp_path, {"switches": []}, "fabric.yaml")
    with pytest.raises(JobError) as excinfo:
        read_job(faulty)
    assert excinfo.value.faults[0].file == tmp_path / "fabric.yaml"


def test_each_file_is_parsed_once_for_each_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a fabric file that two jobs name."""
    parsed: list[Path] = []
    real = yaml_lines.read_document

    def count_reading(file: Path) -> Document:
        parsed.append(file)
        return real(file)

    monkeypatch.setattr(yaml_lines, "read_document", count_reading)
    data = [job_data("a"), job_data("b", number=1)]
    fabric = write(tmp_path, data[0]["fabric"], "fabric.yaml")
    first, second = (
        write(tmp_path, {**document, "fabric": "fabric.yaml"}, f"{document['job']}.yaml") for document in data
    )
    files = JobFiles([tmp_path])
    assert [job.job for job in files.read().require()] == ["a", "b"]
    assert sorted(parsed) == [first, second, fabric]
    assert not files.have_changed()
    assert len(parsed) == 3
    second.unlink()
    assert files.have_changed()
    assert [job.job for job in files.read().require()] == ["a"]
    os.utime(fabric, ns=(1, 1))
    assert files.have_changed()


def test_a_file_that_is_written_while_it_is_read_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = yaml_lines.read_document

    def read_and_write(file: Path) -> Document:
        document = real(file)
        os.utime(file, ns=(1, 1))
        return document

    write(tmp_path, job_data())
    files = JobFiles([tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(yaml_lines, "read_document", read_and_write)
        files.read()
    assert files.have_changed()
    files.read()
    assert not files.have_changed()


def test_a_fabric_file_that_is_written_while_it_is_first_read_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = yaml_lines.read_document
    fabric = write(tmp_path, job_data()["fabric"], "fabric.yaml")

    def read_and_write(file: Path) -> Document:
        document = real(file)
        if file == fabric:
            os.utime(file, ns=(1, 1))
        return document

    files = JobFiles([write(tmp_path, {**job_data(), "fabric": "fabric.yaml"})])
    with monkeypatch.context() as patch:
        patch.setattr(yaml_lines, "read_document", read_and_write)
        files.read()
    assert files.have_changed()


def faulty(files: int, of_each: int = 1) -> list[Located]:
    return [
        Located(Path(f"jobs/{file}.yaml"), line + 1, "job", f"wrong{line}")
        for file in range(files)
        for line in range(of_each)
    ]


def test_the_faults_of_thousands_of_files_are_told_in_brief() -> None:
    """An owner had the controller write 1 MB at each change of any file."""
    lines = FaultLog().news(faulty(2000, 3)).splitlines()
    assert lines[0] == "jobs/0.yaml:1: job: wrong0"
    assert len(lines) == 21
    assert lines[-1] == "and 5,980 other faults; `checkmate validate` shows all"
    assert len(FaultLog().news(faulty(1, 100)).splitlines()) == 6
    assert len(FaultLog().news([Located(Path("a"), 1, "job", "x" * 1_000_000)])) <= 600


def test_a_change_of_one_file_tells_only_its_own_faults() -> None:
    log, before = FaultLog(), faulty(20)
    assert len(log.news(before).splitlines()) == 20
    assert log.news(before) == ""
    new = Located(Path("jobs/new.yaml"), 3, "channels", "must be at least 1")
    lines = log.news([*before, new]).splitlines()
    assert lines == [str(new), "and 20 other faults; `checkmate validate` shows all"]
    assert log.news(before) == ""
    assert log.news([*before, new]).startswith(str(new))  # it is new again


def test_no_owner_hides_the_faults_of_another() -> None:
    """Those for which there was no room come next, before newer ones."""
    log, hidden = FaultLog(), Located(Path("jobs/zz.yaml"), 1, "job", "is missing")
    first = log.news([*faulty(20), hidden])
    assert str(hidden) not in first
    newer = [Located(Path(f"jobs/{i}.yaml"), 1, "job", "wrong again") for i in range(40)]
    assert log.news([*newer, hidden]).startswith(str(hidden))
    news = [log.news(newer) for _ in range(4)]
    assert sum(len(text.splitlines()) - ("other" in text) for text in news if text) == 21
