"""flex_decode of short rows over keys and values, for which a Hopper has a kernel of its own."""

from __future__ import annotations

from functools import partial

import kernels.attention.test_attention as checks
import pytest
import torch
from rigs.kernels.attention_batches import MODIFIER_CASES, Layer, Row, finished, make_batch, modifier_case
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.attention import plan

pytestmark = pytest.mark.gpu

# One key, and ends of blocks and of splits with a key before and behind them; empty, skipped and fresh rows among them.
ENDS = [Row(1, n - 1) for n in (1, 63, 64, 65, 127, 128, 129, 255, 256, 257)]
RAGGED = [*ENDS, Row(0, 9), Row(5, 0), Row(5, 61), Row(5, 1020), Row(2, 30, skipped=True), Row(4, 700), Row(0, 0)]
# Models' sizes of heads, groups that do not fill a tile, pages of one block of keys and of several.
LAYERS = [
    Layer(16, 2, 256, 256, 64),
    Layer(24, 4, 256, 256, 128),
    Layer(32, 8, 128, 128, 64),
    Layer(14, 2, 128, 128, 256),
    Layer(4, 4, 64, 64, 64),
    Layer(64, 1, 64, 64, 64),
]
SMALL = Layer(6, 2, 64, 64, 64)


@pytest.fixture(params=[64, 1024])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut rows in splits of so many keys; one program takes several of a row."""
    cut(monkeypatch, request.param)
    return int(request.param)


def cut(monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    """A split is whole tiles, also of the kernel that has ranges of each head."""
    monkeypatch.setattr(plan, "SPLITS", ())
    monkeypatch.setattr(plan, "MOST_KEYS", split)
    monkeypatch.setattr(plan, "SHORT", {size: (32, *rest) for size, (_, *rest) in plan.SHORT.items()})


def in_wide_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give batches of general tests pages that a block of keys fits in."""
    monkeypatch.setattr(checks, "make_batch", partial(make_batch, layer=SMALL))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_ragged_rows(half_path: Path, layer: Layer, split: int) -> None:
    batch = make_batch(RAGGED, half_path, layer, max_short=5)
    checks.check(batch, half_path, *modifier_case("causal", layer, len(RAGGED) + 2, half_path.device), scale=0.05)


@pytest.mark.parametrize("case", MODIFIER_CASES)
def test_modified_rows(half_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, layer: Layer = SMALL) -> None:
    cut(monkeypatch, 64)
    rows = [Row(1, 200), Row(3, 5), Row(0, 9), Row(2, 30, skipped=True), Row(1, 0), Row(5, 90), Row(1, 1500)]
    batch = make_batch(rows, half_path, layer, max_short=5)
    checks.check(batch, half_path, *modifier_case(case, layer, len(rows) + 2, half_path.device))


def test_rows_of_thousands(half_path: Path) -> None:
    batch = make_batch([Row(1, 8190), Row(1, 2047), Row(5, 4091)], half_path, LAYERS[0], max_short=5)
    checks.check(batch, half_path, *modifier_case("causal", batch.layer, 5, half_path.device))


def test_many_rows(half_path: Path) -> None:
    """More than one look at rows takes in kernel.py, and most of them of no tokens."""
    rows = [Row(int(i % 3 == 0), i) for i in range(300)]
    batch = make_batch(rows, half_path, LAYERS[2], max_short=1)
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


@pytest.mark.parametrize("case", ["causal", "soft-cap-in-a-window"])
def test_rows_do_not_depend_on_neighbours(
    half_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, layer: Layer = LAYERS[3]
) -> None:
    monkeypatch.setitem(checks.KINDS, case, layer)
    cut(monkeypatch, 64)
    checks.test_attention_does_not_depend_on_neighbours(half_path, case, None)


def test_rows_read_only_their_window(half_path: Path, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_wide_pages(monkeypatch)
    checks.test_attention_reads_only_its_window(half_path, None)


def test_queries_that_see_nothing(half_path: Path, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_wide_pages(monkeypatch)
    checks.test_attention_of_queries_that_see_nothing_is_zero(half_path, None)


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[2], LAYERS[5]], ids=str)
def test_rows_repeat_to_the_bit(half_path: Path, layer: Layer) -> None:
    batch = make_batch([Row(5, 4000 - 97 * i) for i in range(32)], half_path, layer, max_short=5)
    modifiers, _ = modifier_case("causal", batch.layer, 34, half_path.device)
    first = batch.attend(half_path, modifiers)
    for _ in range(20):
        again = batch.attend(half_path, modifiers)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_pages_behind_2_31_values(half_path: Path) -> None:
    """A row whose pages are the last of a pool that 32 bits do not count the values of."""
    layer = LAYERS[0]
    batch = make_batch([Row(1, 300), Row(5, 120)], half_path, layer, max_short=5)
    modifiers, _ = modifier_case("causal", layer, 4, half_path.device)
    want = batch.attend(half_path, modifiers)[0]
    size = batch.k_pages[0].numel()
    before = 2**31 // size + 1
    for name in ("k_pages", "v_pages"):
        pages = getattr(batch, name)
        pool = torch.empty(before + len(pages), *pages.shape[1:], dtype=pages.dtype, device=pages.device)
        pool[before:] = pages
        setattr(batch, name, pool)
    batch.page_table = batch.page_table + before
    assert torch.equal(batch.attend(half_path, modifiers)[0], want)
