"""An engine over ranks: whatever changes the state of one process changes it on all, and no rank works for nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.rank_processes import run_ranks
from rigs.ranked_engine import drive, idle, leave
from rigs.ranked_layers import MODELS, write_configs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_configs(tmp_path, {"hybrid": MODELS["hybrid"]})["hybrid"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_batches_and_changes_between_them_are_those_of_one_process(
    config: Path, tmp_path: Path, world_size: int
) -> None:
    """Drafts, their commit, new pages, a waypoint, an adapter, pages that are placed and copied, zeroed lines."""
    with torch.inference_mode():
        whole = drive(None, config)
    made, *others = run_ranks(drive, world_size, tmp_path, config)
    assert others == [[]] * (world_size - 1)
    for ours, expected in zip(made, whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))


def test_a_rank_sleeps_while_there_is_nothing_to_do(config: Path, tmp_path: Path) -> None:
    _, busy_s = run_ranks(idle, 2, tmp_path, config, 2.0)
    assert busy_s < 0.5


def test_a_rank_that_goes_while_nothing_is_asked_is_a_lost_device(config: Path, tmp_path: Path) -> None:
    (is_known, has_failed, is_told), _ = run_ranks(leave, 2, tmp_path, config)
    assert is_known and has_failed and is_told
