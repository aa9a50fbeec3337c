"""The doctor on the hosts of a lab, before and while its processes run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import check_document
from tests.support.labs.live import needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from topologies.crew import CHECKMATE, Crew, serving
from topologies.describe.topology import CONTROLLER, build
from topologies.lab import Lab

pytestmark = [needs_root, needs_clang]


def diagnosed(crew: Crew, *nodes: str) -> dict[str, Any]:
    """Return what the doctor finds on these nodes, at once; none of them lacks anything."""
    command: list[str | Path] = [*CHECKMATE, "doctor", crew.lab.job_file, "--json"]
    members = {node: crew.start(f"doctor-{node}", node, command) for node in nodes}
    crew.finish(list(members.values()), 60)
    documents = {node: json.loads(member.output_text()) for node, member in members.items()}
    for document in documents.values():
        check_document("doctor", document)
    return {node: document["roles"][0] for node, document in documents.items()}


def outcomes(role: Any, check: str) -> list[str]:
    return [finding["outcome"] for finding in role["findings"] if finding["check"] == check]


@pytest.mark.slow
def test_each_host_of_a_lab_is_able_and_asking_leaves_no_trace(name: str) -> None:
    with Lab(build("pair", on_one_switch(2, (2,))), name=name) as lab, Crew(lab) as crew:
        before = diagnosed(crew, "rank0", "shadow0", CONTROLLER)
        assert [role["role"] for role in before.values()] == ["trainer", "shadow", "controller"]
        assert outcomes(before["rank0"], "BPF") == ["ok"]
        assert outcomes(before["rank0"], "shadow nodes") == ["warning"]
        assert outcomes(before["shadow0"], "ARP") == outcomes(before["shadow0"], "routes") == ["ok"]
        assert outcomes(before[CONTROLLER], "switch tor") == ["ok"]
        assert outcomes(before[CONTROLLER], "clocks of nodes") == ["ok"]
        with serving(crew) as control:
            serve: list[str | Path] = [*CHECKMATE, "shadow", lab.job_file, "--id", "0", "--no-view"]
            node = crew.start("node", "shadow0", serve)
            crew.wait(lambda: "ready" in node.output_text(), "the shadow node", 60)
            lines = [process.output_text() + process.error_text() for process in (control.member, node)]
            after = diagnosed(crew, "rank1", "shadow0", CONTROLLER)
            assert outcomes(after["rank1"], "shadow nodes") == outcomes(after["rank1"], "versions") == ["ok"]
            assert outcomes(after["rank1"], "step records") == outcomes(after["shadow0"], "ports") == ["ok"]
            assert outcomes(after[CONTROLLER], "switch tor") == ["ok"]
            assert [
                process.output_text() + process.error_text() for process in (control.member, node)
            ] == lines
