"""The tests of compat.flex_decoding again: the Triton kernel in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import kernels.compat.test_compat_flex as checks
import pytest
import torch
from kernels.compat.test_compat_flex import (
    eager,
    test_every_head_and_block_of_queries_has_a_list_of_its_own,
    test_flex_broadcasts_keys_of_one_sequence,
    test_flex_takes_any_order_of_memory,
    test_flex_takes_scores_in_turn_and_a_scale,
    test_flex_without_keys_or_queries,
    test_whole_blocks_skip_the_mask_and_never_the_score,
)
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import flex, flex_decoding


@pytest.fixture
def path() -> InterpretedPath:
    return InterpretedPath("cpu", torch.float16)


@pytest.mark.parametrize("sizes", [{"HQ": 6}, {"M": 1, "N": 700}, {"M": 20, "N": 7}], ids=str)
def test_flex_matches_flex_attention(path: InterpretedPath, sizes: dict[str, int]) -> None:
    checks.test_flex_matches_flex_attention(path, sizes)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut keys in splits of 64, so that those of tests, and lists of blocks, have several."""
    from deltaline_kernels.attention import plan

    monkeypatch.setattr(plan, "SPLITS", ())
    monkeypatch.setattr(plan, "MOST_KEYS", 64)
    monkeypatch.setattr(plan, "SHORT", {size: (32, *rest) for size, (_, *rest) in plan.SHORT.items()})


def test_flex_takes_a_block_mask(path: InterpretedPath, small_splits: None) -> None:
    checks.test_flex_takes_a_block_mask(path, (64, 32))


def test_keys_are_used_where_they_are(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaline_kernels.attention import launch

    inputs, seen = checks.make(path), []
    monkeypatch.setattr(launch, "flex_decode_triton", lambda q, keys, *_: seen.append(keys))
    flex_decoding(inputs.q, inputs.k, inputs.v)
    transposed = inputs.k.transpose(1, 2).contiguous().transpose(1, 2)
    flex_decoding(inputs.q, transposed, transposed)
    assert [keys.k.data_ptr() for keys in seen] == [inputs.k.data_ptr(), transposed.data_ptr()]
