"""Live recovery, in a network namespace of the test's own, because torchft listens on all addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.evaluation.systems import LIVE, is_installed


@pytest.mark.skipif(not is_installed(LIVE), reason="make comparators has not installed torchft")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a network namespace")
def test_others_go_on_and_a_rank_that_comes_back_takes_their_state() -> None:
    job = f"ip link set lo up && exec {sys.executable} -m tests.benchmarks.live_job"
    result = subprocess.run(
        ["unshare", "--net", "sh", "-c", job],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RUST_LOG": "error"},
    )
    assert result.returncode == 0, result.stderr[-6000:]
    output = json.loads(result.stdout.splitlines()[-1])
    assert output["status"] == -9
    (first, state), (killed, same), (third, last) = output["ranks"]
    assert state == same == last, "all end with the same state"
    assert first == third, "two ranks have all iterations"
    assert [iteration for iteration, _ in first] == [*range(60)]
    sizes = [ranks for _, ranks in first]
    assert sizes[:8] == [3] * 8 and 2 in sizes and sizes[-1] == 3, sizes
    back = killed[0][0]  # it looks on in its first iteration
    assert [iteration for iteration, _ in killed] == [*range(back, 60)], "it goes on where the others are"
    assert back >= 8 and dict(first)[back] == 2
