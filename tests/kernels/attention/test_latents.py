"""flex_decode over latents, whose first channels are the values too."""

from __future__ import annotations

import kernels.attention.test_attention as checks
import pytest
import torch
from kernels.attention.test_attention import small_splits
from rigs.kernels.attention_batches import Layer, Row, finished, make_batch, modifier_case
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import flex_decode
from deltaline_kernels.attention.plan import AttentionHeads, choose_group, choose_tile

__all__ = ["small_splits"]

ROWS = [Row(1, 150), Row(3, 60), Row(0, 9), Row(2, 30, skipped=True), Row(9, 40)]
# Channels of a latent and behind it as models have them, none behind, and odd ones.
SIZES = {"576-512": (576, 512), "512-512": (512, 512), "41-33": (41, 33), "7-4": (7, 4), "200-130": (200, 130)}


def latents(num_heads: int, sizes: tuple[int, int], page: int = 16) -> Layer:
    return Layer(num_heads, 1, *sizes, page, is_latent=True)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_latents_are_keys_and_values(path: Path, sizes: tuple[int, int], small_splits: None) -> None:
    batch = make_batch(ROWS, path, latents(6, sizes), max_short=3)
    checks.check(batch, path, *modifier_case("causal", batch.layer, 7, path.device), scale=0.1)


@pytest.mark.parametrize("num_heads", [1, 20, 96])
def test_latents_have_any_number_of_heads(path: Path, num_heads: int, small_splits: None) -> None:
    """More than a tile has are in several."""
    batch = make_batch([Row(1, 150), Row(20, 30)], path, latents(num_heads, (80, 64), 64), max_short=1)
    checks.check(batch, path, *modifier_case("causal", batch.layer, 4, path.device))


def test_latents_have_sinks_and_a_gate(path: Path, small_splits: None) -> None:
    batch = make_batch(ROWS, path, latents(6, (72, 64)), max_short=3)
    modifiers, truth = modifier_case("causal", batch.layer, 7, path.device)
    o, lse = batch.attend(path, modifiers, sinks=batch.sinks, gate=batch.gate)
    want, want_lse = finished(batch, *batch.expected(truth), sinks=True, gate=True)
    assert_close("o", o, want, path.dtype)
    checks.lse_close(lse, want_lse)


def test_latents_do_not_depend_on_neighbours(path: Path, small_splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.KINDS, "causal", latents(6, (72, 64)))
    checks.test_attention_does_not_depend_on_neighbours(path, "causal", small_splits)


def test_sums_of_latents_find_room_in_registers() -> None:
    """What other keys have is as it was measured: all heads that share one are in one tile."""
    for num_heads, value_bytes, group in ((32, 2, 32), (128, 2, 64), (96, 2, 48), (7, 2, 7), (64, 4, 16)):
        heads = AttentionHeads(num_heads, 1, 576, 512, 1.0, is_latent=True)
        assert choose_group(heads, value_bytes) == group
        for long in (False, True):
            tile = choose_tile(heads, group, 4, 16, value_bytes, long=long)
            assert 512 * tile.columns <= 128 * 32 * tile.num_warps
    assert choose_group(AttentionHeads(128, 1, 256, 256, 1.0), 2) == 128


def test_latents_name_the_wrong_argument() -> None:
    batch = make_batch([Row(1, 20)], Path("cpu", torch.float32), latents(2, (40, 32)))
    pages, table, rows = batch.k_pages, batch.page_table, batch.rows
    wide = torch.zeros(2, 16, 1, 700), torch.zeros(1, 2, 700)
    for kind, name, q, k, v, value_dim in (
        (TypeError, "value_dim", batch.q, pages, None, None),
        (TypeError, "value_dim", batch.q, pages, None, True),
        (ValueError, "value_dim", batch.q, pages, None, 41),
        (ValueError, "value_dim", batch.q, pages, None, 0),
        (ValueError, "value_dim", batch.q, pages, pages, 40),
        (ValueError, "value_dim", wide[1], wide[0], None, 513),
        (ValueError, "k_pages", wide[1], wide[0], None, 512),
    ):
        with pytest.raises(kind, match=rf"^{name}: "):
            flex_decode(q, k, v, table, rows, value_dim=value_dim)
