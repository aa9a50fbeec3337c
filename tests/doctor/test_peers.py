"""Other hosts: what their answers mean, and that asking leaves nothing behind."""

from __future__ import annotations

import logging
import threading
from importlib import metadata
from pathlib import Path

import pytest

from checkmate.doctor import peers
from checkmate.doctor.findings import Finding, Outcome
from checkmate.doctor.subjects import choose, shadow
from checkmate.job.validation import data_of, of_data
from checkmate.keys.access import INSECURE
from checkmate.keys.contexts import client_context
from checkmate.keys.roles import Role
from checkmate.nodes.other_ranks import job_ranks
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.process import Serving
from testbed.copies import local_job
from testbed.jobs import job
from tests.support.keys import role_keys, secured
from tests.support.labs.end_hosts import needs_buffers

GPT = job("gpt", nodes=3)
NODES = list(GPT.shadow_nodes)
OK, WARNING, FAILED, SKIPPED = Outcome.OK, Outcome.WARNING, Outcome.FAILED, Outcome.SKIPPED


def answer(torch: str = "", ranks: pb.JobRanks | None = None) -> pb.NodeStatus:
    return pb.NodeStatus(protocol=PROTOCOL, torch=torch, job_ranks=ranks)


def outcomes(findings: list[Finding]) -> list[tuple[str, Outcome]]:
    return [(finding.check, finding.outcome) for finding in findings]


def test_silence_is_a_warning_and_a_refusal_a_failure() -> None:
    answers = {
        0: "can't be reached (Connection refused)",
        1: "can't be reached (no route)",
        2: "did not answer in time",
    }
    findings = peers.judge_answers(GPT, NODES, answers)
    assert outcomes(findings) == [("shadow nodes", WARNING)] * 3 + [("versions", SKIPPED)]
    assert "shadow node 0 (192.168.100.0:7000) can't be reached (Connection refused)" in findings[0].detail
    older = "the node has protocol 4, this host has 5: the node has an older version; install the same"
    (bad, *_) = peers.judge_answers(GPT, NODES, {**answers, 0: older})
    assert (bad.outcome, bad.remedy) == (FAILED, "install the same")
    denied = "its certificate is not one for this address by the authority in this host's folder of keys"
    (bad, *_) = peers.judge_answers(GPT, NODES, {**answers, 0: denied})
    assert (bad.outcome, "keys of the same job" in bad.remedy) == (FAILED, True)


def test_many_silent_nodes_are_not_listed_all() -> None:
    many = job("gpt", nodes=20)
    findings = peers.judge_answers(
        many, many.shadow_nodes, dict.fromkeys(range(20), "did not answer in time")
    )
    assert [finding.detail for finding in findings if "more do not answer" in finding.detail] == [
        "12 more do not answer"
    ]
    assert len(findings) == 8 + 1 + 1


def test_versions_are_compared_as_far_as_nodes_tell_them() -> None:
    version = metadata.version("torch")
    status = answer(version, job_ranks(GPT))
    findings = peers.judge_answers(GPT, NODES[:1], {0: status})
    assert outcomes(findings) == [("shadow nodes", OK), ("versions", OK)]
    (_, finding) = peers.judge_answers(GPT, NODES[:1], {0: answer("2.4.0")})
    assert (finding.outcome, "2.4.0 on shadow nodes" in finding.detail) == (WARNING, True)
    (_, finding) = peers.judge_answers(GPT, NODES[:1], {0: answer(version, job_ranks(job("gpt", ranks=5)))})
    assert (finding.outcome, "copy the same job file" in finding.remedy) == (FAILED, True)
    assert "of 5 ranks, this host with 1 DP group of 3 ranks" in finding.detail


def test_the_last_refusal_is_a_warning() -> None:
    status = answer(metadata.version("torch"), job_ranks(GPT))
    status.refusal.CopyFrom(pb.Refusal(iteration=12, rank="rank 0 (a)", text="a hook changes p0"))
    (*_, last) = peers.judge_answers(GPT, NODES[:2], {0: status, 1: "did not answer in time"})
    assert (last.check, last.outcome) == ("training", WARNING)
    assert last.detail == "the last start was refused in iteration 12 on rank 0 (a): a hook changes p0"


def test_a_host_calls_the_nodes_of_its_ranks_groups_or_all_others() -> None:
    data = data_of(job("gpt", groups=2, nodes=4), exclude_none=True)
    data["dp_groups"][0]["shadow_nodes"], data["dp_groups"][1]["shadow_nodes"] = [0, 1], [2, 3]
    two = of_data(type(GPT), data)
    assert [node.id for node in peers.called_nodes(choose(two, Role.TRAINER, 4, None))] == [2, 3]
    assert [node.id for node in peers.called_nodes(shadow(two, 3))] == [0, 1, 2]


@needs_buffers
def test_nodes_answer_and_have_no_line_about_who_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With keys; the second node is not started."""
    monkeypatch.delenv(INSECURE)
    secured_job = secured(local_job(nodes=2), tmp_path)
    keys = role_keys(secured_job, tmp_path, Role.TRAINER)
    with caplog.at_level(logging.INFO), Serving(secured_job, 0):
        caplog.clear()
        answers = peers.ask_nodes(secured_job, secured_job.shadow_nodes, keys)
        findings = peers.judge_answers(secured_job, secured_job.shadow_nodes, answers)
        assert outcomes(findings) == [("shadow nodes", WARNING), ("shadow nodes", OK), ("versions", OK)]
        assert "shadow node 1" in findings[0].detail
        records = peers.records(secured_job.shadow_nodes, client_context(keys))
        assert [finding.outcome for finding in records] == [WARNING, OK]
        assert "Connection refused" in records[0].detail
        for thread in threading.enumerate():  # those that served the connection have ended without a word
            if thread.name.startswith("records of "):
                thread.join(10)
    assert not [line for line in caplog.messages if "records from" in line or "refused" in line]
