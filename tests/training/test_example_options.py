"""The options of the examples."""

from __future__ import annotations

import argparse

import pytest
import torch

from checkmate.examples import common


@pytest.mark.parametrize("device", ["nonsense", "cuda:77"])
def test_a_device_that_is_not_there_is_one_error(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    common.add_device(parser)
    assert parser.parse_args([]).device == torch.device("cpu")
    with pytest.raises(SystemExit) as excinfo:
        parser.parse_args(["--device", device])
    assert excinfo.value.code == 2
    assert f"{device} can't be used here" in capsys.readouterr().err
