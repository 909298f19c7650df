"""flex_decode over latents of 512 channels, for which a Hopper has a kernel of its own."""

from __future__ import annotations

import kernels.attention.test_attention as checks
import pytest
import torch
from kernels.attention.test_latents import latents
from rigs.kernels.attention_batches import Layer, Row, finished, make_batch, modifier_case
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

pytestmark = pytest.mark.gpu

# One key, and ends of blocks and of splits with a key before and behind them; empty, skipped and long rows among them.
ENDS = [Row(1, n - 1) for n in (1, 63, 64, 65, 255, 256, 257)]
RAGGED = [*ENDS, Row(0, 9), Row(5, 0), Row(5, 61), Row(5, 1020), Row(2, 30, skipped=True), Row(4, 700), Row(0, 0)]
LAYERS = [latents(32, (576, 512), 64), latents(16, (512, 512), 128), latents(64, (576, 512), 64)]


@pytest.fixture(params=[64, 1024])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut rows in splits of so many keys; one program takes several of a row."""
    cut(monkeypatch, request.param)
    return int(request.param)


def cut(monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    monkeypatch.setattr("deltaline_kernels.attention.plan.LATENT_SPLITS", ())
    monkeypatch.setattr("deltaline_kernels.attention.plan.MOST_KEYS", split)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_ragged_rows(half_path: Path, layer: Layer, split: int) -> None:
    batch = make_batch(RAGGED, half_path, layer, max_short=5)
    checks.check(batch, half_path, *modifier_case("causal", layer, len(RAGGED) + 2, half_path.device), scale=0.05)


def test_rows_of_thousands(half_path: Path) -> None:
    batch = make_batch([Row(1, 8190), Row(1, 2047), Row(5, 4091)], half_path, LAYERS[1], max_short=5)
    checks.check(batch, half_path, *modifier_case("causal", batch.layer, 5, half_path.device))


@pytest.mark.parametrize("num_heads", [1, 20, 48, 128])
def test_any_number_of_heads(half_path: Path, num_heads: int) -> None:
    batch = make_batch([Row(1, 700), Row(5, 300)], half_path, latents(num_heads, (576, 512), 64), max_short=5)
    checks.check(batch, half_path, *modifier_case("causal", batch.layer, 4, half_path.device))


def test_many_rows(half_path: Path) -> None:
    """More than one look at rows takes in kernel.py, and most of them of no tokens."""
    rows = [Row(int(i % 3 == 0), i) for i in range(300)]
    batch = make_batch(rows, half_path, LAYERS[0], max_short=1)
    checks.check(batch, half_path, *modifier_case("causal", batch.layer, 302, half_path.device))


@pytest.mark.parametrize("split_of", [64, 2048])
def test_sinks_and_a_gate(
    half_path: Path, split_of: int, monkeypatch: pytest.MonkeyPatch, layer: Layer = LAYERS[0]
) -> None:
    """Both where a row's splits are put together and where it has one."""
    cut(monkeypatch, split_of)
    rows = [Row(1, 150), Row(3, 60), Row(0, 9), Row(2, 30, skipped=True)]
    batch = make_batch(rows, half_path, layer, max_short=3)
    modifiers, truth = modifier_case("causal", batch.layer, 7, half_path.device)
    o, lse = batch.attend(half_path, modifiers, sinks=batch.sinks, gate=batch.gate)
    want, want_lse = finished(batch, *batch.expected(truth), sinks=True, gate=True)
    assert_close("o", o, want, half_path.dtype)
    checks.lse_close(lse, want_lse)


def test_rows_do_not_depend_on_neighbours(
    half_path: Path, monkeypatch: pytest.MonkeyPatch, layer: Layer = LAYERS[0]
) -> None:
    monkeypatch.setitem(checks.KINDS, "causal", layer)
    cut(monkeypatch, 64)
    checks.test_attention_does_not_depend_on_neighbours(half_path, "causal", None)


def test_rows_repeat_to_the_bit(half_path: Path) -> None:
    batch = make_batch([Row(1, 8000 - 97 * i) for i in range(32)], half_path, LAYERS[0], max_short=1)
    modifiers, _ = modifier_case("causal", batch.layer, 34, half_path.device)
    first = batch.attend(half_path, modifiers)
    for _ in range(20):
        again = batch.attend(half_path, modifiers)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
