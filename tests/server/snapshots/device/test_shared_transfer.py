"""States over ranks: the same bytes at any number of ranks, from which sequences go on at any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.rank_processes import run_ranks
from rigs.ranked_layers import MODELS, write_configs
from rigs.ranked_states import carry


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    [
        ("streams", (4, 1)),
        pytest.param("streams", (2, 4, 1), marks=pytest.mark.sweep),
        pytest.param("bamba", (2, 4, 1), marks=pytest.mark.sweep),
    ],
)
def test_a_state_goes_from_one_process_over_ranks_and_back_with_its_bytes(
    tmp_path: Path, name: str, world_sizes: tuple[int, ...]
) -> None:
    """Drafts to be taken in, commits, keys of fewer heads than ranks; every next step gives what one process gives."""
    config = write_configs(tmp_path, {name: MODELS[name]})[name]
    with torch.inference_mode():
        made = carry(None, config, None)
    assert made is not None
    first, outputs = made
    stored = first
    for world_size in world_sizes:
        if world_size == 1:
            with torch.inference_mode():
                carried = carry(None, config, stored)
        else:
            folder = tmp_path / str(world_size)
            folder.mkdir()
            carried, *others = run_ranks(carry, world_size, folder, config, stored)
            assert others == [None] * (world_size - 1)
        assert carried is not None
        stored, next_outputs = carried
        np.testing.assert_array_equal(stored, first)
        for ours, expected in zip(next_outputs, outputs, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))
