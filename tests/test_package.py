"""What `import checkmate` gives: a version, functions, and the errors that they raise."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest

import checkmate


def test_the_version_is_the_packages() -> None:
    assert checkmate.__version__ == metadata.version("checkmate-training")


@pytest.mark.parametrize("function", [checkmate.restore, checkmate.protect])
def test_each_error_that_a_function_raises_is_exported(function: object) -> None:
    _, _, raises = (function.__doc__ or "").partition("Raises:")
    names = re.findall(r"^\s+(\w+): ", raises, re.M)
    assert len(names) >= 4
    for name in names:
        assert issubclass(getattr(checkmate, name), checkmate.CheckmateError), name


def test_all_names_exist_and_others_do_not() -> None:
    for name in checkmate.__all__:
        assert getattr(checkmate, name) is not None
    assert set(checkmate.__all__) <= set(dir(checkmate))
    with pytest.raises(AttributeError, match="module 'checkmate' has no attribute 'resotre'"):
        checkmate.resotre  # type: ignore[attr-defined]  # noqa: B018


def test_an_import_needs_no_torch() -> None:
    script = "import sys, checkmate; print(checkmate.__version__, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == f"{checkmate.__version__} False\n"


_COLLECTED = """
import gc, torch.distributed, torch.nn.parallel, checkmate
{before}
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
checkmate.restore, checkmate.protect
print(len(passes), gc.get_count()[0] < gc.get_threshold()[0], gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "0 True True False"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gc.disable()", "0 True False False"), ("gc.freeze()", "True True"))
        ),
    ],
    ids=["as it is", "disabled", "frozen"],
)
def test_imports_leave_the_garbage_collector_nothing_to_search(before: str, after: str) -> None:
    """A pass over all that they create takes as long as a tenth of them. What callers froze stays frozen."""
    script = _COLLECTED.format(before=before)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith(after)
