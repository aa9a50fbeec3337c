"""The tutorials' commands run as they stand, one page after another; only the name of the lab differs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs.live import needs_root

ROOT = Path(__file__).parents[2]
LABS = {
    "1-laptop": "try",
    "2-script": "mine",
    "4-operate": "ops",
    "5-recover": "crash",
    "6-shards": "shards",
}
"""By page, the name that its lab has. The third page needs a real switch."""
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def lab(name: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name; what the page leaves in `out` is removed."""
    yield name
    subprocess.run(["rm", "-rf", ROOT / "out" / name], check=True)


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", LABS)
def test_a_tutorial_works(page: str, lab: str) -> None:
    text = (ROOT / "docs" / "tutorial" / f"{page}.md").read_text()
    script = re.sub(rf"\b{LABS[page]}\b", lab, "\n".join(_BLOCK.findall(text)))
    begin = "set -eux -o pipefail\nranks=() shadows=()\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    script = begin + script
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
