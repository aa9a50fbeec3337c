"""The error of a script is found in what torchrun and ranks have written."""

from __future__ import annotations

import pytest

from topologies.training.job_processes import script_errors

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    checkmate.protect(model, optimizer)
{}
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
checkmate: a line of the log
"""


@pytest.mark.parametrize("rank", ["", "[rank0]: "])
@pytest.mark.parametrize(
    "error",
    [
        "ValueError: no",
        "checkmate.training.errors.SessionError: no",
        "checkmate.optim.supported.UnsupportedOptimizer: Adafactor can't be followed",
        "checkmate.tagger.errors.TaggerUnavailable: no",
        "KeyboardInterrupt",
    ],
)
def test_an_error_is_found_whatever_its_class_is_called(rank: str, error: str) -> None:
    assert script_errors(TRACEBACK.format(rank + error)) == [error]
