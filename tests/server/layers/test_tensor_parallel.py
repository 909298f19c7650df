"""Models that 2 and 4 processes share, of every family: what they compute is what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rigs.layer_oracle import TOLERANCE, assert_close
from rigs.rank_processes import run_ranks
from rigs.ranked_layers import STATE, STEPS, play_all, sum_summands, write_configs
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gradients")

Played = dict[str, dict[str, Tensor]]
WORLDS = (2, 4)
# Tokens of the first row of STEPS.
FIRST = slice(sum(lengths[0] for lengths, _, _ in STEPS))


def outputs_of(played: dict[str, Tensor]) -> dict[str, Tensor]:
    """What came out, without the state that was left."""
    return {key: value for key, value in played.items() if not key.startswith(STATE)}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_configs(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="module")
def whole(configs: dict[str, Path]) -> Played:
    with torch.inference_mode():
        return play_all(None, configs)


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_compute_what_one_process_does(
    whole: Played, configs: dict[str, Path], tmp_path: Path, world_size: int
) -> None:
    """One test for all that is asked of all models: the processes take longer to start than all the rest."""
    ranks = run_ranks(play_all, world_size, tmp_path, configs)
    for name, played in whole.items():
        check_outputs(name, played, ranks)
        check_bits(name, ranks)
        check_state(name, played, ranks)
        check_company(name, ranks)


def check_outputs(name: str, whole: dict[str, Tensor], ranks: list[Played]) -> None:
    """What comes out is what one process computes."""
    for ran, expected in outputs_of(whole).items():
        assert_close(ranks[0][name][ran], expected)
        assert float((ranks[0][name][ran] - expected).abs().max()) < TOLERANCE * float(expected.abs().max()), (
            name,
            ran,
        )
    assert float((whole["adapted"] - whole["once"])[FIRST].norm()) > 0.1, name


def check_bits(name: str, ranks: list[Played]) -> None:
    """Every rank has the same bits, and has them again."""
    first, *others = (rank[name] for rank in ranks)
    assert torch.equal(first["again"], first["once"]), name
    for other in others:
        assert all(torch.equal(other[ran], made) for ran, made in outputs_of(first).items()), name


def check_state(name: str, whole: dict[str, Tensor], ranks: list[Played]) -> None:
    """Each rank keeps the state of its heads; of fewer heads than ranks, neighbours keep the same one, bitwise."""
    for key in whole.keys() - outputs_of(whole).keys():
        expected, parts = whole[key], [rank[name][key] for rank in ranks]
        copies = len(parts) * parts[0].shape[1] // expected.shape[1]
        assert_close(torch.cat(parts[::copies], dim=1), expected)
        assert all(torch.equal(part, parts[i // copies * copies]) for i, part in enumerate(parts)), (name, key)
        assert copies == 1 or expected.shape[1] < len(parts), (name, key)


def check_company(name: str, ranks: list[Played]) -> None:
    """A row's bits do not depend on its company."""
    ran = ranks[0][name]
    assert torch.equal(ran["beside another"][FIRST], ran["once"][FIRST]), name
    assert not torch.equal(ran["beside another"], ran["once"]), name


def test_summands_are_summed_in_fp32_in_the_order_of_ranks_and_rounded_once(tmp_path: Path) -> None:
    shapes = [(67, 48), (67, 48), (67, 48), (0, 48)]
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float32]
    summands = [
        [torch.randn(shape).to(dtype) * 2**rank for shape, dtype in zip(shapes, dtypes, strict=True)]
        for rank in range(4)
    ]
    expected = [
        (((first.float() + second.float()) + third.float()) + fourth.float()).to(first.dtype)
        for first, second, third, fourth in zip(*summands, strict=True)
    ]
    for made in run_ranks(sum_summands, 4, tmp_path, summands):
        assert [one.dtype for one in made] == dtypes
        assert all(map(torch.equal, made, expected))
