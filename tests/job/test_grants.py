"""Several owners: a job has what the operator's fabric file grants it, and touches nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.job import following
from checkmate.job.boundaries import streams
from checkmate.job.conflicts import between_jobs, own_claims
from checkmate.job.fabric_file import (
    STREAMS,
    address_extent,
    mac_extent,
    port_range,
    read_fabric,
    service_extent,
)
from checkmate.job.files import JobError, JobSet, read_set
from checkmate.job.following import JobFiles, JobsToServe
from checkmate.job.grants import not_covered, refusals, too_many_streams
from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.job.yaml_lines import read_document
from controlplane import plan as planning
from p4src import table_sizes
from testbed.jobs import job_data, tofino_job_data
from tests.support.grants import fabric_of, grant_of
from tests.support.job_files import edited, write
from tests.support.jobs import lists_of_jobs

FIRST, SECOND = job_data("one", switches=2), job_data("two", switches=2, number=1)
RANK = "dp_groups/0/ranks/0/"


def read(folder: Path, fabric: Any, *jobs: Any) -> JobSet:
    """Write a fabric file and jobs, and read them with their grants."""
    file = write(folder, fabric, "fabric.yaml")
    files = [write(folder, job, f"{number}.yaml") for number, job in enumerate(jobs)]
    return read_set(files, granted=read_fabric(file, read_document))


def fabric_faults(folder: Path, fabric: Any) -> dict[str, str]:
    with pytest.raises(JobError) as excinfo:
        read_fabric(write(folder, fabric, "fabric.yaml"), read_document)
    return {fault.path: fault.message for fault in excinfo.value.faults}


def test_what_is_granted_is_accepted(tmp_path: Path) -> None:
    job_set = read(tmp_path, fabric_of(FIRST, SECOND), FIRST, SECOND)
    assert job_set.faults == ()
    assert [job.job for _, job in job_set.sound] == ["one", "two"]


@pytest.mark.parametrize(
    ("change", "value", "path", "words"),
    [
        (f"{RANK}port", FIRST["dp_groups"][0]["ranks"][0]["port"], "dp_groups[0].ranks[0].port", "job 'one'"),
        (f"{RANK}port", 77, "dp_groups[0].ranks[0].port", "no job"),
        (f"{RANK}ip", "10.0.0.1", "dp_groups[0].ranks[0].ip", "job 'one'"),
        (f"{RANK}addresses", ["10.0.0.1"], "dp_groups[0].ranks[0].addresses[0]", "job 'one'"),
        (f"{RANK}mac", "02:00:00:00:00:00", "dp_groups[0].ranks[0].mac", "job 'one'"),
        ("shadow_nodes/0/nics/0/ip", "10.0.0.1", "shadow_nodes[0].nics[0].ip", "job 'one'"),
        ("shadow_nodes/0/nics/0/mac", "02:00:00:aa:00:00", "shadow_nodes[0].nics[0].mac", "no job"),
        ("shadow_nodes/0/mgmt", "192.168.100.0:9000", "shadow_nodes[0].mgmt", "job 'one'"),
        ("shadow_nodes/0/records", "192.168.100.0:9000", "shadow_nodes[0].records", "job 'one'"),
        ("shadow_nodes/0/mgmt", "SHADOW.example.org:70", "shadow_nodes[0].mgmt", "no job"),
    ],
)
def test_a_claim_that_is_not_granted_is_refused_and_harms_nobody(
    tmp_path: Path, change: str, value: Any, path: str, words: str
) -> None:
    job_set = read(tmp_path, fabric_of(FIRST, SECOND), edited(SECOND, change, value), FIRST)
    assert {fault.path for fault in job_set.faults} == {path}
    message = job_set.faults[0].message
    assert f" is granted to {words}" in message
    assert " of job 'two' are " in message
    assert "fabric.yaml:" in message
    assert job_set.faults[0].line > 1
    assert [job.job for _, job in job_set.sound] == ["one"], (
        "the other one is not refused, whatever the order"
    )


def test_stub_addresses_and_the_ports_of_links_are_nobodys(tmp_path: Path) -> None:
    wide = fabric_of(FIRST, SECOND)
    wide["grants"]["two"] = {**grant_of(SECOND), "addresses": ["10.1.0.0/16", "10.255.0.0/16"]}
    # its own fabric file leaves that switch out, so the job by itself has no fault
    job = edited(job_data("two", number=1), f"{RANK}ip", "10.255.0.2")
    wide["grants"]["two"]["ports"] = {"tor0": ["101-120"]}
    (fault,) = read(tmp_path, wide, job).faults
    assert "is that of a switch's stub" in fault.message
    wide["grants"]["two"]["ports"] = {"tor0": ["400-401"]}
    assert "has a link already" in fabric_faults(tmp_path, wide)["grants.two.ports.tor0[0]"]


@pytest.mark.parametrize(
    ("change", "value", "path", "words"),
    [
        ("switches/0/address", "127.0.0.1:1", "switches[0].address", "must be 127.0.0.1:9559, as in"),
        ("switches/0/stub/ip", "10.255.0.9", "switches[0].stub", "must be as in"),
        ("switches/0/device_id", 2, "switches[0].device_id", "must be 1, as in"),
        ("switches/0/name", "torx", "switches[0].name", "no switch 'torx' in"),
        ("links/0/0/port", 9, "links[0]", "has no link between port 9 of tor0 and port 300 of tor1"),
    ],
)
def test_the_fabric_is_the_operators(tmp_path: Path, change: str, value: Any, path: str, words: str) -> None:
    job_set = read(tmp_path, fabric_of(FIRST), edited(FIRST, f"fabric/{change}", value))
    assert words in {fault.path: fault.message for fault in job_set.faults}[f"fabric.{path}"]
    assert job_set.sound == ()


def test_tls_and_what_a_job_leaves_out_are_the_operators(tmp_path: Path) -> None:
    fabric = fabric_of(FIRST)
    fabric["switches"][0] = {**fabric["switches"][0], "tls": {"ca": "operator.pem"}}
    own_data = edited(FIRST, "fabric/switches/0/tls", {"ca": "/etc/shadow"})
    job_set = read(tmp_path, fabric, own_data)
    assert job_set.faults == ()
    tls = job_set.sound[0][1].fabric.switches[0].tls
    assert tls is not None
    assert tls.ca == tmp_path / "operator.pem"


def test_a_job_may_name_the_operators_file(tmp_path: Path) -> None:
    job_set = read(tmp_path, fabric_of(FIRST), {**FIRST, "fabric": "fabric.yaml"})
    assert job_set.faults == ()
    assert read_set([tmp_path / "0.yaml"]).faults == (), "also without its grants"


def test_a_file_that_a_job_names_as_fabric_is_not_read(tmp_path: Path) -> None:
    """An owner learns nothing of files that only the controller may read, and needs no copy of the fabric."""
    (tmp_path / "secret").write_text("password: [hunter2")
    for fabric_name in ("secret", "missing", "/proc/self/mem"):
        job_set = read(tmp_path, fabric_of(FIRST), {**FIRST, "fabric": fabric_name})
        assert (job_set.faults, len(job_set.sound)) == ((), 1)
        assert tmp_path / fabric_name not in job_set.files


def test_without_a_sound_fabric_file_no_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password: [hunter2")
    (tmp_path / "jobs").mkdir()
    write(tmp_path, {**FIRST, "fabric": "secret"}, "jobs/one.yaml")
    fabric = write(tmp_path, {**fabric_of(FIRST), "links": 7}, "fabric.yaml")
    job_set = JobFiles([tmp_path / "jobs"], fabric).read()
    assert {fault.file for fault in job_set.faults} == {fabric}
    assert job_set.sound == ()


def test_a_job_grants_itself_nothing(tmp_path: Path) -> None:
    own_data = edited(FIRST, "fabric/grants", {"one": grant_of(FIRST)})
    messages = {fault.path: fault.message for fault in read(tmp_path, fabric_of(SECOND), own_data).faults}
    assert "has no grant for job 'one'; it has some for two" in messages["job"]
    assert "unknown key" in messages["fabric.grants"]


def test_a_name_belongs_to_a_folder(tmp_path: Path) -> None:
    """Also against a link from another owner's folder."""
    alice, bob = tmp_path / "alice", tmp_path / "bob"
    fabric = fabric_of(FIRST, SECOND)
    fabric["grants"]["one"]["folder"] = "alice"
    file = write(tmp_path, fabric, "fabric.yaml")
    for folder in (alice, bob):
        folder.mkdir()
    write(alice, FIRST)
    write(bob, FIRST)
    (bob / "linked.yaml").symlink_to(alice / "job.yaml")
    for folders in ([alice, bob], [bob, alice]):
        job_set = JobFiles(folders, file).read()
        assert [path for path, _ in job_set.sound] == [alice / "job.yaml"]
        assert [fault.file.name for fault in job_set.faults] == ["job.yaml", "linked.yaml"]
        assert all("must be in" in fault.message for fault in job_set.faults)


def test_bit_priority_and_streams_are_granted(tmp_path: Path) -> None:
    job = {**FIRST, "tag": {"dscp_bit": 1, "priority": 5}, "channels": 4}
    fabric = fabric_of(FIRST)
    fabric["grants"]["one"]["streams"] = 7
    messages = {fault.path: fault.message for fault in read(tmp_path, fabric, job).faults}
    assert set(messages) == {"tag.dscp_bit", "tag.priority", "dp_groups"}
    assert messages["tag.priority"].startswith("must be 3, which job 'one' has (")
    assert messages["dp_groups"].startswith("has 8 streams, and job 'one' may have 7 (")
    fabric["grants"]["one"] |= {"streams": 8, "tag": {"dscp_bit": 1, "priority": 5}}
    assert read(tmp_path, fabric, job).faults == ()


def test_a_grant_without_a_number_has_a_switchs_table() -> None:
    assert table_sizes("softswitch")["streams"] == STREAMS


@pytest.mark.parametrize(
    ("grant", "path", "words"),
    [
        ({"ports": {"tor0": [1]}}, "ports.tor0[0]", "overlaps what job 'one' has in line"),
        ({"ports": {"tor0": ["0-9"]}}, "ports.tor0[0]", "overlaps"),
        ({"addresses": ["10.0.0.0/24"]}, "addresses[0]", "overlaps"),
        ({"macs": ["02:00:00:00:00:00/40"]}, "macs[0]", "overlaps"),
        ({"shadow_nodes": ["192.168.0.0/16"]}, "shadow_nodes[0]", "overlaps"),
        ({"shadow_nodes": ["192.168.100.0:1"]}, "shadow_nodes[0]", "overlaps"),
        ({"ports": {"torx": [1]}}, "ports.torx", "no switch 'torx'"),
        ({"ports": {"tor0": ["1/0"]}}, "ports.tor0[0]", "have numbers: its target is softswitch"),
        ({"ports": {"tor0": ["9-1"]}}, "ports.tor0[0]", "must be a port from 0 to 509, a range"),
        ({"addresses": ["10.0.0.5/24"]}, "addresses[0]", "such as 10.0.0.0/24, or one address"),
        ({"macs": ["02:00:00:00:01:01/40"]}, "macs[0]", "must be a MAC address, or the first one of a block"),
        ({"shadow_nodes": ["a b"]}, "shadow_nodes[0]", "must be a host, HOST:PORT or a network"),
        ({"colour": 1}, "colour", "unknown key; the keys here are folder, ports"),
    ],
)
def test_faults_of_a_grant(tmp_path: Path, grant: Any, path: str, words: str) -> None:
    fabric = fabric_of(FIRST)
    fabric["grants"]["two"] = grant
    messages = fabric_faults(tmp_path, fabric)
    assert words in messages[f"grants.two.{path}"]
    assert len(messages) == 1


def test_front_panel_names_are_granted(tmp_path: Path) -> None:
    job = tofino_job_data()
    fabric = fabric_of(job)
    assert read(tmp_path, fabric, job).faults == ()
    fabric["grants"]["demo"]["ports"]["tor0"].pop(0)
    (fault,) = read(tmp_path, fabric, job).faults
    assert fault.path == "dp_groups[0].ranks[0].port"


def test_extents() -> None:
    assert service_extent("Shadow.example.org.:7") == service_extent("shadow.example.org:7")
    assert service_extent("[::ffff:a00:1]:7") == service_extent("10.0.0.1:7")
    assert service_extent("fd00::/64").has(service_extent("[fd00::9]:7000"))
    assert service_extent("shadow0").has(service_extent("shadow0:65535"))
    assert not service_extent("10.0.0.1").has(service_extent("10.0.0.2:0001"))
    assert address_extent("10.0.0.0/30").has(address_extent("10.0.0.3"))
    assert mac_extent("02:00:00:00:00:00/40").has(mac_extent("02:00:00:00:00:FF"))
    assert port_range("3-5") == (3, 5)
    wrong: object
    for wrong in ("", "10.0.0.0.0", "01:00:00:00:00:00", None, 5, [], "10.0.0.0/99"):
        with pytest.raises(ValueError, match="must be"):
            address_extent(wrong)
        with pytest.raises(ValueError, match="must be"):
            mac_extent(wrong)


@settings(max_examples=40)
@given(jobs=lists_of_jobs(), data=st.data())
def test_no_job_touches_what_another_was_granted(
    jobs: list[Job], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However jobs mix their claims: those that are accepted share no claim, and no entry of a switch."""
    folder = tmp_path_factory.mktemp("jobs")
    raws = [data_of(job, exclude_none=True) for job in jobs]
    granted = read_fabric(write(folder, fabric_of(*raws), "fabric.yaml"), read_document)
    hosts = [host for raw in raws for group in raw["dp_groups"] for host in group["ranks"]]
    hosts += [nic for raw in raws for node in raw["shadow_nodes"] for nic in node["nics"]]
    before = {host["mac"] for raw in raws[:1] for group in raw["dp_groups"] for host in group["ranks"]}
    for _ in range(data.draw(st.integers(0, 2))):
        to, source = data.draw(st.sampled_from(hosts)), data.draw(st.sampled_from(hosts))
        for key in data.draw(st.lists(st.sampled_from(["ip", "mac", "port"]), min_size=1)):
            to[key] = source[key]
    granted_jobs = [raw for raw in raws if not refusals(raw, folder / "job.yaml", granted)]
    assert before
    assert between_jobs(granted_jobs) == []
    owners = {raw["job"]: {(claim.kind, claim.text) for claim in own_claims(raw)} for raw in granted_jobs}
    for job, claimed in owners.items():
        for claim in own_claims(next(raw for raw in raws if raw["job"] == job)):
            assert all(owner == job or (claim.kind, claim.text) not in owners[owner] for owner in owners), (
                claim
            )
        assert claimed


@settings(max_examples=20)
@given(jobs=lists_of_jobs(most=1))
def test_streams_are_counted_as_they_are(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> None:
    (job,) = jobs
    folder = tmp_path_factory.mktemp("jobs")
    fabric = fabric_of(data_of(job, exclude_none=True))
    count = len(list(streams(job)))
    assert sum(len(switch_plan.streams) for switch_plan in planning.plan([job]).values()) == count
    for most, is_refused in ((count, False), (count - 1, True)):
        fabric["grants"][job.job]["streams"] = max(most, 1)
        granted = read_fabric(write(folder, fabric, "fabric.yaml"), read_document)
        assert bool(list(too_many_streams(job, granted))) is is_refused


def served(files: JobFiles) -> JobsToServe:
    job_set = files.jobs_to_serve(lambda job: "its keys are missing" if job.channels == 8 else None)
    files.note_served(job_set)
    return job_set


RANK_VALUES = FIRST["dp_groups"][0]["ranks"][0]


@pytest.mark.parametrize(
    "tagged_value", ["!!binary b25l", "!!set {one}", "!!omap [one: 1]", "!!pairs [one: 1]"]
)
def test_values_that_readers_take_differently_are_refused(tmp_path: Path, tagged_value: str) -> None:
    text = yaml.safe_dump(SECOND, sort_keys=False)
    assert "job: two" in text
    job_set = read(
        tmp_path, fabric_of(FIRST, SECOND), FIRST, text.replace("job: two", f"job: {tagged_value}", 1)
    )
    (fault,) = job_set.faults
    assert fault.message == f"has the tag {tagged_value.split(maxsplit=1)[0]}: remove it"
    assert [job.job for _, job in job_set.sound] == ["one"]


def test_a_rank_without_a_host_claims_its_own_interface(tmp_path: Path) -> None:
    """A host that is null is not one, whoever looks at it."""
    wrong = edited(SECOND, f"{RANK}host", None)
    assert read(tmp_path, fabric_of(FIRST, SECOND), FIRST, wrong).faults == ()
    for key in ("ip", "mac", "port"):
        job_set = read(
            tmp_path, fabric_of(FIRST, SECOND), FIRST, edited(wrong, f"{RANK}{key}", RANK_VALUES[key])
        )
        assert [job.job for _, job in job_set.sound] == ["one"], key
        assert f"dp_groups[0].ranks[0].{key}" in {fault.path for fault in job_set.faults}


def test_an_address_that_is_not_one_is_not_granted(tmp_path: Path) -> None:
    for address in ("one/x:7000", "192.168.0.11/32:7000"):
        job_set = read(
            tmp_path, fabric_of(FIRST, SECOND), FIRST, edited(SECOND, "shadow_nodes/0/mgmt", address)
        )
        assert [job.job for _, job in job_set.sound] == ["one"]
        assert {fault.path for fault in job_set.faults} == {"shadow_nodes[0].mgmt"}


def test_what_would_be_served_is_within_the_grant_whatever_the_file_looks_like(tmp_path: Path) -> None:
    granted = read_fabric(write(tmp_path, fabric_of(FIRST, SECOND), "fabric.yaml"), read_document)
    assert list(not_covered(of_data(Job, SECOND), granted)) == []
    paths = [f"{RANK}{key}" for key in ("ip", "mac", "port")] + ["job"]
    for path in [*paths, "shadow_nodes/0/mgmt", "shadow_nodes/0/nics/0/port"]:
        value: Any = FIRST
        for part in path.split("/"):
            value = value[int(part)] if part.isdigit() else value[part]
        (fault,) = not_covered(of_data(Job, edited(SECOND, path, value)), granted)
        assert fault.path == ("job",), path


def two_owners(folder: Path) -> tuple[Path, Path, JobFiles]:
    """Write both jobs and their grants; return jobs' folder, fabric file, and files followed."""
    jobs = folder / "jobs"
    jobs.mkdir()
    fabric = write(folder, fabric_of(FIRST, SECOND), "fabric.yaml")
    write(jobs, FIRST, "1.yaml")
    write(jobs, SECOND, "2.yaml")
    return jobs, fabric, JobFiles([jobs], fabric)


def test_a_copy_of_ones_own_file_keeps_nobody_from_changing(tmp_path: Path) -> None:
    folder, _, files = two_owners(tmp_path)
    served(files)
    write(folder, {**SECOND, "channels": 2}, "0.yaml")
    write(folder, {**FIRST, "channels": 2}, "1.yaml")
    job_set = served(files)
    assert {job.job: job.channels for job in job_set.jobs} == {"one": 2, "two": 1}
    assert {fault.file for fault in job_set.faults} <= {folder / "0.yaml", folder / "2.yaml"}


def test_one_owners_mistakes_keep_nobody_from_changing(tmp_path: Path) -> None:
    folder, file, files = two_owners(tmp_path)
    first = served(files)
    assert [job.job for job in first.jobs] == ["one", "two"]
    for wrong in (
        "job: [",
        edited(SECOND, f"{RANK}port", 1),
        {**SECOND, "job": "one"},
        {**SECOND, "channels": 8},
    ):
        write(folder, {**FIRST, "channels": 2}, "1.yaml")
        write(folder, wrong, "2.yaml")
        job_set = served(files)
        assert [job.job for job in job_set.jobs] == ["one", "two"]
        assert [job.channels for job in job_set.jobs] == [2, 1], "one has changed, and two is as it was"
        assert {fault.file for fault in job_set.faults} == {folder / "2.yaml"}
    (folder / "2.yaml").unlink()
    os.mkfifo(folder / "link")
    (folder / "2.yaml").symlink_to(folder / "link")
    assert [job.job for job in served(files).jobs] == ["one"], "a pipe is not listed, so its job has gone"
    (folder / "2.yaml").unlink()
    write(folder, {**SECOND, "fabric": "link"}, "2.yaml")  # it would block whoever reads it
    assert [job.job for job in served(files).jobs] == ["one", "two"], "the operator's fabric is used"
    write(folder, "job: [", "2.yaml")
    again = JobFiles([folder], file)
    assert [job.job for job in served(again).jobs] == ["one"], "a fresh start knows no other state of two"


def test_while_a_job_is_faulty_its_grant_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served of it might be granted to another job now."""
    folder, file, files = two_owners(tmp_path)
    served(files)
    fabric = fabric_of(FIRST)
    write(tmp_path, fabric, "fabric.yaml")
    assert files.have_changed()
    with pytest.raises(JobError, match="has no grant for job 'two'"):
        served(files)
    (folder / "2.yaml").unlink()
    with pytest.raises(JobError, match="has no grant for job 'two'"):
        served(files)  # its file may come back
    monkeypatch.setattr(following, "ABSENCE_SECONDS", 0.0)
    assert [job.job for job in served(files).jobs] == ["one"]
    shutil.move(file, tmp_path / "away.yaml")
    with pytest.raises(JobError, match="cannot be read"):
        served(files)
