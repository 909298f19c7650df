"""Models that 2 and 4 processes share, of every family: what they compute is what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rigs.layer_oracle import TOLERANCE, assert_close
from rigs.rank_processes import run_ranks
from rigs.ranked_layers import MODELS, STATE, STEPS, play_all, sum_summands, write_configs
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


@pytest.fixture(scope="module", params=WORLDS)
def ranks(
    request: pytest.FixtureRequest, configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Played]:
    return run_ranks(play_all, request.param, tmp_path_factory.mktemp("ranks"), configs)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_what_one_process_does(whole: Played, ranks: list[Played], name: str) -> None:
    for ran, expected in outputs_of(whole[name]).items():
        assert_close(ranks[0][name][ran], expected)
        assert float((ranks[0][name][ran] - expected).abs().max()) < TOLERANCE * float(expected.abs().max())
    assert float((whole[name]["adapted"] - whole[name]["once"])[FIRST].norm()) > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_the_same_bits_and_has_them_again(ranks: list[Played], name: str) -> None:
    first, *others = (rank[name] for rank in ranks)
    assert torch.equal(first["again"], first["once"])
    for other in others:
        assert all(torch.equal(other[ran], made) for ran, made in outputs_of(first).items())


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_keeps_the_state_of_its_heads(whole: Played, ranks: list[Played], name: str) -> None:
    """Of fewer heads than ranks, neighbours keep the same one, bitwise."""
    for key in whole[name].keys() - outputs_of(whole[name]).keys():
        expected, parts = whole[name][key], [rank[name][key] for rank in ranks]
        copies = len(parts) * parts[0].shape[1] // expected.shape[1]
        assert_close(torch.cat(parts[::copies], dim=1), expected)
        assert all(torch.equal(part, parts[i // copies * copies]) for i, part in enumerate(parts))
        assert copies == 1 or expected.shape[1] < len(parts)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_s_bits_do_not_depend_on_its_company(ranks: list[Played], name: str) -> None:
    ran = ranks[0][name]
    assert torch.equal(ran["beside another"][FIRST], ran["once"][FIRST])
    assert not torch.equal(ran["beside another"], ran["once"])


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
