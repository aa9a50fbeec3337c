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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{checkmate.__version__} False\n"
