"""Checkpoints use what torch does not promise to keep: a torch without it is refused with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nvrx_slurm.checkpointing.storage.torch_internals import SUPPORTED, require


def test_what_there_is_comes_alone_or_as_a_tuple() -> None:
    assert require("torch.serialization", "location_tag") is torch.serialization.location_tag
    assert require("torch", "Tensor", "dtype") == (torch.Tensor, torch.dtype)


@pytest.mark.parametrize(
    ("module", "name"), [("torch.serialization", "no_such_thing"), ("torch.no_such_module", "anything")]
)
def test_what_a_torch_lacks_is_named_with_the_versions_that_have_it(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=rf"torch {SUPPORTED}; this is .*no_such"):
        require(module, name)


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    with pytest.raises(ImportError, match=rf"torch {SUPPORTED}, this is 2\.7\.1"):
        require("torch", "Tensor")


def test_it_is_the_range_that_the_package_asks_for_and_the_version_that_is_tested() -> None:
    root = Path(__file__).parents[2]
    lowest, highest = SUPPORTED.split(" to ")
    assert f"torch>={lowest}\n" in (root / "setup.cfg").read_text()
    tested = re.search(r"^torch==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.M)
    assert tested is not None
    assert tested[1] == highest
