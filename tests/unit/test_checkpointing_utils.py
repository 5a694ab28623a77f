"""Helpers that users of NVIDIA's extension import."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from nvrx_slurm.checkpointing.utils import (
    debug_time,
    dict_list_map_outplace,
    preload_tensors,
    wrap_for_async,
)


def test_a_map_of_a_nested_state_leaves_it_as_it_was() -> None:
    state = {"a": [1, {"b": 2}], "c": (3,)}
    assert dict_list_map_outplace(lambda leaf: leaf * 2, state) == {"a": [2, {"b": 4}], "c": (3, 3)}
    assert state == {"a": [1, {"b": 2}], "c": (3,)}


def test_preloaded_tensors_do_not_change_with_the_originals() -> None:
    state = {"a": [torch.zeros(3)], "step": 1}
    loaded = preload_tensors(state)
    state["a"][0] += 1  # type: ignore[index]
    assert not loaded["a"][0].any()
    assert loaded["step"] == 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_wrapped_function_runs(fails: bool) -> None:
    def function() -> bool:
        if fails:
            raise ArithmeticError
        return gc.isenabled()

    if fails:
        with pytest.raises(ArithmeticError):
            wrap_for_async(function)()
    else:
        assert wrap_for_async(function)() is False
    assert gc.isenabled()


def test_a_time_is_logged_and_below_a_threshold_it_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with debug_time("quick"):
        pass
    with debug_time("nothing", threshold=1000):
        pass

    @debug_time("slow", threshold=0)
    def slow() -> None:
        pass

    slow()
    assert [(r.levelname, r.message.split()[0]) for r in caplog.records] == [
        ("DEBUG", "quick"),
        ("WARNING", "slow"),
    ]
