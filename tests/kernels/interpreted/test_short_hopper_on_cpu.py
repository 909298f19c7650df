"""The attention of short rows for Hopper, run on the CPU: what it computes, not how it waits."""

from __future__ import annotations

import kernels.attention.test_attention as attention_checks
import kernels.attention.test_latents as checks
import kernels.attention.test_latents_hopper as latent_checks
import kernels.attention.test_short_hopper as short_checks
import pytest
import torch
from kernels.attention.test_attention import small_splits
from rigs.kernels.attention_batches import Layer, Row, make_batch, modifier_case
from rigs.kernels.gluon_on_cpu import OnCpu
from rigs.kernels.paths import InterpretedPath

hopper_short = pytest.importorskip("deltaline_kernels.attention.hopper_short", reason="triton is not installed")
launch = pytest.importorskip("deltaline_kernels.attention.launch", reason="triton is not installed")

LAYER = Layer(6, 2, 64, 64, 64)
SMALL = checks.latents(3, (128, 64), 64)
HALF = InterpretedPath("cpu", torch.float16)
__all__ = ["small_splits"]


@pytest.fixture(autouse=True)
def hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "can_attend_short", lambda *_: True)
    monkeypatch.setattr(hopper_short, "attend_short_kernel", OnCpu(hopper_short.attend_short_kernel))


@pytest.mark.parametrize(
    ("layer", "room"), [(LAYER, 228), (Layer(14, 1, 128, 128, 128), 200), (Layer(20, 2, 64, 64, 64), 90)], ids=str
)
def test_rows_of_keys_and_values(layer: Layer, room: int, small_splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of even and of odd numbers of tiles; seven heads of five tokens, and ten, fill no tile."""
    monkeypatch.setattr("deltaline_kernels.attention.plan.SHARED_BYTES", room << 10)
    batch = make_batch([*checks.ROWS, Row(5, 129)], HALF, layer, max_short=5)
    attention_checks.check(batch, HALF, *modifier_case("causal", layer, 8), scale=0.1)


@pytest.mark.parametrize(
    "case",
    ["none", "sliding-window", "soft-cap-of-each-head", "document-of-each-sequence", "prefix-lm", "sinks-and-window"],
)
def test_modified_rows(case: str, small_splits: None) -> None:
    rows = [Row(1, 200), Row(3, 5), Row(2, 30, skipped=True), Row(5, 90)]
    batch = make_batch(rows, HALF, LAYER, max_short=5)
    attention_checks.check(batch, HALF, *modifier_case(case, LAYER, 6))


def test_rows_of_lines_that_share_pages(small_splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    attention_checks.test_attention_of_lines_that_share_pages(HALF, small_splits, monkeypatch, LAYER)


def test_rows_read_only_their_window(small_splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    short_checks.test_rows_read_only_their_window(HALF, 64, monkeypatch)


def test_queries_that_see_nothing(small_splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    short_checks.test_queries_that_see_nothing(HALF, 64, monkeypatch)


@pytest.mark.parametrize("split", [64, 512])
def test_rows_have_sinks_and_a_gate(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short_checks.test_sinks_and_a_gate(HALF, split, monkeypatch, LAYER)


@pytest.mark.parametrize("case", ["causal", "soft-cap-in-a-window"])
def test_rows_do_not_depend_on_neighbours(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short_checks.test_rows_do_not_depend_on_neighbours(HALF, case, monkeypatch, LAYER)


@pytest.mark.parametrize(("num_heads", "sizes", "page"), [(6, (192, 128), 64), (20, (64, 64), 128)], ids=str)
def test_rows_of_latents(num_heads: int, sizes: tuple[int, int], page: int, small_splits: None) -> None:
    batch = make_batch(checks.ROWS, HALF, checks.latents(num_heads, sizes, page), max_short=3)
    attention_checks.check(batch, HALF, *modifier_case("causal", batch.layer, 7), scale=0.1)


def test_heads_are_in_several_tiles(small_splits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaline_kernels.attention.plan.LATENT_HEADS", 8)
    batch = make_batch([Row(3, 150), Row(1, 30)], HALF, checks.latents(15, (128, 64), 64), max_short=3)
    attention_checks.check(batch, HALF, *modifier_case("causal", batch.layer, 4))


@pytest.mark.parametrize("layer", [LAYER, SMALL], ids=str)
@pytest.mark.parametrize("split", [64, 128, 512])
def test_rows_end_anywhere_in_a_split(split: int, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at its end and with one key behind it; in one go there are several splits, and with 512 there is one."""
    latent_checks.cut(monkeypatch, split)
    short_checks.cut(monkeypatch, split)
    rows = [Row(1, position) for position in (0, 62, 63, 64, 255, 256)] + [Row(5, 126)]
    batch = make_batch(rows, HALF, layer, max_short=5)
    attention_checks.check(batch, HALF, *modifier_case("causal", layer, 12))


@pytest.mark.parametrize("split", [64, 512])
def test_latents_have_sinks_and_a_gate(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    latent_checks.test_sinks_and_a_gate(HALF, split, monkeypatch, SMALL)


def test_latents_do_not_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    latent_checks.test_rows_do_not_depend_on_neighbours(HALF, monkeypatch, SMALL)
