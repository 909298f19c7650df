"""The attention of long rows for Hopper, run on the CPU: what it computes, not how it waits."""

from __future__ import annotations

import kernels.attention.test_attention as checks
import pytest
import torch
from rigs.kernels.attention_batches import Layer, finished, make_batch, modifier_case
from rigs.kernels.gluon_on_cpu import OnCpu
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.tolerance import assert_close

hopper_tile = pytest.importorskip("deltaline_kernels.attention.hopper_tile", reason="triton is not installed")
launch = pytest.importorskip("deltaline_kernels.attention.launch", reason="triton is not installed")

HALF = InterpretedPath("cpu", torch.float16)


@pytest.fixture(autouse=True)
def hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "can_attend", lambda *_: True)
    monkeypatch.setattr(hopper_tile, "attend_long_kernel", OnCpu(hopper_tile.attend_long_kernel))


@pytest.mark.parametrize("layer", [Layer(4, 2, 128, 128, 128), Layer(12, 2, 256, 256, 64)], ids=str)
def test_long_rows_match_flex_attention(layer: Layer) -> None:
    checks.test_attention_of_long_causal_rows(HALF, layer)


def test_a_tile_has_any_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 heads nine tokens' fill 63 of 64 rows, in blocks of half a page with three of them on their way."""
    monkeypatch.setattr(hopper_tile, "HOPPER", {64: (64, 32, 3, 4)})
    checks.test_attention_of_long_causal_rows(HALF, Layer(7, 1, 64, 64, 64))


def test_long_rows_do_not_depend_on_neighbours() -> None:
    checks.test_attention_does_not_depend_on_neighbours(HALF, "causal", None)


def test_long_rows_have_sinks_and_a_gate() -> None:
    batch = make_batch(checks.LONG, HALF, Layer(6, 2, 128, 128, 64), max_short=1)
    modifiers, truth = modifier_case("causal", batch.layer, batch.page_table.shape[0])
    o, lse = batch.attend(HALF, modifiers, sinks=batch.sinks, gate=batch.gate)
    want, want_lse = finished(batch, *batch.expected(truth), sinks=True, gate=True)
    assert_close("o", o, want, HALF.dtype)
    checks.lse_close(lse, want_lse)
