"""flex_decode against eager flex_attention of PyTorch and its reference, and what must hold between its own runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.attention_batches import (
    MODIFIER_CASES,
    Batch,
    Layer,
    Row,
    Truth,
    finished,
    make_batch,
    modifier_case,
)
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_kernels.attention import Modifiers, and_masks, find_modifier, flex_decode, flex_decode_reference

# Decodes, verifies of several lengths, an empty row, a skipped one, a fresh one, and one that is too long to be short.
MIXED = [Row(1, 200), Row(3, 5), Row(0, 9), Row(2, 30, skipped=True), Row(1, 0), Row(8, 90), Row(20, 40)]
# Rows for long ones that end inside a block of keys, at its end and behind it; empty, skipped and fresh ones.
LONG = [Row(1, 200), Row(150, 0), Row(0, 9), Row(30, 90, skipped=True), Row(64, 64), Row(70, 300), Row(3, 0)]
PLAIN = Layer()
# What a Hopper has a kernel of its own for in 16 bits, and what it has none for.
KINDS = {"causal": Layer(6, 2, 128, 128, 64), "soft-cap-in-a-window": Layer(6, 2)}


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows in splits of 64 keys, so that those of tests have several."""
    from deltaline_kernels.attention import plan

    monkeypatch.setattr(plan, "SPLITS", ())
    monkeypatch.setattr(plan, "LATENT_SPLITS", ())
    monkeypatch.setattr(plan, "MOST_KEYS", 64)
    monkeypatch.setattr(plan, "FEW_COMBINES", 0)
    monkeypatch.setattr(plan, "MANY", (64, 2))
    monkeypatch.setattr(plan, "WIDE", (64, 2))
    monkeypatch.setattr(plan, "SHORT", {size: (32, *rest) for size, (_, *rest) in plan.SHORT.items()})


def lse_close(got: Tensor, want: Tensor) -> None:
    """Fail unless infinities are at the same places and the rest agrees: it is not rounded, whatever the dtype."""
    got, want = got.double().cpu(), want.double().cpu()
    assert torch.equal(got.isinf(), want.isinf())
    assert float((got - want).nan_to_num(0, 0, 0).abs().max()) < 2e-3 if got.numel() else True


def check(
    batch: Batch, path: Path, modifiers: Modifiers | None = None, truth: Truth | None = None, **options: Any
) -> None:
    """Compare with eager flex_attention and with the reference, both in fp64. options: as of `flex_decode`."""
    o, lse = batch.attend(path, modifiers, **options)
    want, want_lse = batch.expected(truth or Truth(), options.get("scale"))
    assert_close("o", o, want, path.dtype)
    lse_close(lse, want_lse)
    want, want_lse = flex_decode_reference(
        batch.q.double(),
        batch.k_pages.double(),
        None if batch.layer.is_latent else batch.v_pages.double(),
        batch.page_table,
        batch.rows,
        modifiers=modifiers,
        return_lse=True,
        value_dim=batch.layer.DV,
        **options,
    )
    assert_close("o", o, want, path.dtype)
    lse_close(lse, want_lse)


@pytest.mark.parametrize("case", MODIFIER_CASES)
def test_attention_matches_flex_attention(path: Path, case: str, small_splits: None) -> None:
    batch = make_batch(MIXED, path, max_short=8)
    check(batch, path, *modifier_case(case, batch.layer, batch.page_table.shape[0], path.device))


@pytest.mark.parametrize("layer", [(4, 4), (6, 2), (5, 1), (12, 2), (7, 1), (16, 1)], ids=lambda x: f"{x[0]}-{x[1]}")
def test_attention_has_any_number_of_heads(path: Path, layer: tuple[int, int], small_splits: None) -> None:
    batch = make_batch([Row(1, 100), Row(4, 80), Row(20, 5)], path, Layer(*layer), max_short=4)
    check(batch, path, *modifier_case("alibi", batch.layer, 5, path.device))


@pytest.mark.parametrize(
    "sizes", [(64, 64), (96, 96), (128, 128), (192, 128), (80, 144), (256, 256), (128, 256)], ids=str
)
def test_attention_has_any_size_of_heads(path: Path, sizes: tuple[int, int], small_splits: None) -> None:
    batch = make_batch([Row(1, 100), Row(3, 20), Row(9, 5)], path, Layer(3, 1, *sizes), max_short=4)
    check(batch, path, *modifier_case("causal", batch.layer, 5, path.device))


@pytest.mark.parametrize("layer", [Layer(4, 2, 128, 128, 128), Layer(12, 2, 256, 256, 64)], ids=str)
def test_attention_of_long_causal_rows(path: Path, layer: Layer) -> None:
    batch = make_batch(LONG, path, layer, max_short=1)
    check(batch, path, *modifier_case("causal", layer, batch.page_table.shape[0], path.device))


@pytest.mark.parametrize("page", [16, 64, 256])
def test_attention_has_pages_of_any_size(path: Path, page: int, small_splits: None) -> None:
    batch = make_batch(
        [Row(1, 15), Row(1, 16), Row(2, 63), Row(1, 300), Row(30, 60)], path, Layer(page=page), max_short=2
    )
    check(batch, path, *modifier_case("causal", batch.layer, 7, path.device))


def test_attention_of_lines_that_share_pages(
    path: Path, small_splits: None, monkeypatch: pytest.MonkeyPatch, layer: Layer = PLAIN
) -> None:
    """Together they have more splits than the pages: nothing is written behind what splits leave for the combine."""
    empty, behind = torch.empty, list[Tensor]()

    def with_more(*shape: Any, **options: Any) -> Tensor:
        if options.get("dtype") is not torch.float32 or len(shape) != 1 or not isinstance(shape[0], int):
            return empty(*shape, **options)
        whole = torch.full((8 * shape[0],), torch.nan, device=options["device"])
        behind.append(whole[shape[0] :])
        return whole[: shape[0]]

    batch = make_batch([Row(2, 382)] * 6, path, layer, max_short=2)
    first = batch.lines[0]
    pages = batch.page_table[first].long()
    batch = replace(
        batch,
        k_pages=batch.k_pages[pages].clone(),
        v_pages=batch.v_pages[pages].clone(),
        page_table=torch.arange(len(pages), dtype=torch.int32, device=path.device).repeat(len(batch.page_table), 1),
        keys=dict.fromkeys(batch.keys, batch.keys[first]),
    )
    modifiers, truth = modifier_case("causal", batch.layer, batch.page_table.shape[0], path.device)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", with_more)
        o, lse = batch.attend(path, modifiers)
    assert all(memory.isnan().all() for memory in behind)
    want, want_lse = batch.expected(truth)
    assert_close("o", o, want, path.dtype)
    lse_close(lse, want_lse)


@pytest.mark.parametrize("most", [1, 40_000], ids=["one-split-of-each-row", "longer-splits"])
def test_attention_leaves_no_more_for_the_combine_than_may_be(
    path: Path, most: int, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltaline_kernels.attention import launch

    monkeypatch.setattr(launch, "MOST_PARTIALS", most)
    batch = make_batch(MIXED, path, max_short=8)
    check(batch, path, *modifier_case("causal", batch.layer, batch.page_table.shape[0], path.device))


def test_attention_has_any_number_of_short_tokens(path: Path, small_splits: None) -> None:
    batch = make_batch([Row(n, 7 * n) for n in range(1, 17)], path, Layer(6, 2), max_short=16)
    check(batch, path, *modifier_case("sliding-window", batch.layer, 18, path.device))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_attention_has_sinks_and_a_gate(path: Path, sinks: bool, gate: bool, small_splits: None) -> None:
    batch = make_batch(MIXED, path, Layer(6, 2), max_short=8)
    modifiers, truth = modifier_case("causal", batch.layer, batch.page_table.shape[0], path.device)
    o, lse = batch.attend(path, modifiers, sinks=batch.sinks if sinks else None, gate=batch.gate if gate else None)
    want, want_lse = finished(batch, *batch.expected(truth), sinks=sinks, gate=gate)
    assert_close("o", o, want, path.dtype)
    lse_close(lse, want_lse)


def test_attention_scales(path: Path) -> None:
    batch = make_batch([Row(1, 50), Row(2, 8)], path)
    check(batch, path, scale=-0.3)


def test_attention_of_queries_that_see_nothing_is_zero(path: Path, small_splits: None) -> None:
    """No key is below a prefix of 0, and in a window of 0 there is none; the score of a bias may be -inf too."""
    batch = make_batch([Row(1, 200), Row(3, 0), Row(20, 70)], path, max_short=4)
    minus = find_modifier("logit_bias")(torch.full((2,), -torch.inf))
    for modifiers in (
        Modifiers(mask=and_masks(find_modifier("sliding_window")(0), find_modifier("causal")()), device=path.device),
        Modifiers(mask=find_modifier("sink_tokens")(0), device=path.device),
        Modifiers([minus], device=path.device),
    ):
        o, lse = batch.attend(path, modifiers)
        assert torch.equal(o, torch.zeros_like(o))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    # With a sink there is a softmax, of nothing but the sink.
    o, lse = batch.attend(path, Modifiers([minus], device=path.device), sinks=batch.sinks)
    assert torch.equal(o, torch.zeros_like(o))
    lse_close(lse, batch.sinks.expand_as(lse))


def test_attention_without_rows_or_tokens(path: Path) -> None:
    empty = make_batch([], path)
    assert empty.attend(path)[0].shape == (0, 4, 64)
    none = make_batch([Row(0, 0), Row(0, 5)], path)
    assert none.attend(path)[0].shape == (0, 4, 64)


def test_attention_of_skipped_rows_is_zero(path: Path) -> None:
    batch = make_batch([Row(2, 5, skipped=True), Row(1, 9), Row(30, 0, skipped=True)], path, max_short=2)
    o, lse = batch.attend(path, sinks=batch.sinks)
    dead = torch.tensor([True, True, False, *[True] * 30])
    assert torch.equal(o[dead.to(o.device)], torch.zeros_like(o[dead.to(o.device)]))
    assert bool((lse[dead.to(o.device)] == -torch.inf).all()) and bool(lse[2].isfinite().all())


def test_attention_reads_only_its_window(path: Path, small_splits: None) -> None:
    """All pages that lie before the window, or behind the sinks and prefixes, hold NaN: who reads them shows it."""
    batch = make_batch([Row(1, 700), Row(2, 500), Row(30, 640)], path, max_short=2)
    modifiers, truth = modifier_case("sliding-window", batch.layer, 5, path.device)
    want = batch.expected(truth)[0]
    for row, line in zip(batch.members, batch.lines, strict=True):
        # Tiles begin at multiples of at most 128 keys.
        dead = max(0, (row.position - 37) // 128 * 128) // batch.layer.page
        pages = batch.page_table[line, :dead].long()
        batch.k_pages[pages] = torch.nan
        batch.v_pages[pages] = torch.nan
        assert dead > 0
    assert_close("o", batch.attend(path, modifiers)[0], want, path.dtype)


@pytest.mark.parametrize("case", KINDS)
def test_attention_does_not_depend_on_neighbours(path: Path, case: str, small_splits: None) -> None:
    """Bitwise, with the bucket fixed: its neighbours, some of them of its shape, are others or have other positions."""
    members = [Row(1, 300), Row(1, 300), Row(3, 100), Row(30, 90), Row(30, 90)]
    batch = make_batch(members, path, KINDS[case], max_short=3)
    modifiers, _ = modifier_case(case, batch.layer, 7, path.device)
    # The interpreter takes a row of NaNs, or an infinity, for a mistake.
    loud = 9.0 if isinstance(path, InterpretedPath) else torch.nan
    every: tuple[dict[str, Any], ...] = ({}, {"sinks": batch.sinks, "gate": batch.gate})
    for options in every[isinstance(path, InterpretedPath) :]:
        whole, lse = batch.attend(path, modifiers, **options)
        for keep, (begin, end) in {0: (0, 1), 2: (2, 5), 3: (5, 35)}.items():
            fields = batch.rows.control.cpu().tolist()
            for i in range(len(members)):
                if i != keep:
                    fields[6][i] = fields[6][i] // 3
                    fields[2][i] = fields[2][i] if i % 2 else -1
            other = replace(
                batch, rows=replace(batch.rows, control=torch.tensor(fields, dtype=torch.int32).to(path.device))
            )
            other.q = batch.q.clone()
            other.q[:begin] = loud
            other.q[end:] = -3.0
            o, other_lse = other.attend(path, modifiers, **options)
            assert torch.equal(o[begin:end], whole[begin:end])
            assert torch.equal(other_lse[begin:end], lse[begin:end])


@pytest.mark.parametrize("case", ["causal", "scores-in-turn"])
def test_attention_repeats_to_the_bit(path: Path, case: str, small_splits: None) -> None:
    batch = make_batch([*MIXED, Row(300, 700)], path, Layer(6, 2, 128, 128, 64), max_short=8)
    modifiers, _ = modifier_case(case, batch.layer, 10, path.device)
    first, second = (batch.attend(path, modifiers) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_attention_leaves_its_inputs_alone(path: Path) -> None:
    batch = make_batch(MIXED, path, max_short=8)
    tensors = (batch.q, batch.k_pages, batch.v_pages, batch.page_table, batch.rows.control, batch.gate, batch.sinks)
    before = [tensor.clone() for tensor in tensors]
    batch.attend(path, sinks=batch.sinks, gate=batch.gate)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(9.0), old.nan_to_num(9.0)) if tensor.is_floating_point() else True
        assert torch.equal(tensor, old) or tensor.is_floating_point()


def test_parameters_may_change_between_launches(path: Path) -> None:
    batch = make_batch([Row(1, 200)], path)
    part = find_modifier("sliding_window")(10)
    modifiers = Modifiers(mask=part, device=path.device)
    batch.attend(path, modifiers)
    modifiers.value(part).fill_(60)
    check(batch, path, modifiers, Truth(None, lambda b, h, q, kv: kv > q - 60))
    fresh = batch.attend(path, Modifiers(mask=find_modifier("sliding_window")(60), device=path.device))
    assert torch.equal(batch.attend(path, modifiers)[0], fresh[0])


def test_attention_names_the_wrong_argument() -> None:
    path = Path("cpu", torch.float32)
    good = make_batch([Row(1, 20), Row(2, 3)], path)

    def call(**changes: Any) -> None:
        names = {"q": good.q, "k_pages": good.k_pages, "v_pages": good.v_pages, "page_table": good.page_table}
        told: dict[str, Any] = {**names, "rows": good.rows, **changes}
        flex_decode(**told)

    call()
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "q", {"q": good.q.long()}),
        (TypeError, "q", {"q": None}),
        (ValueError, "q", {"q": good.q[:, :3]}),
        (ValueError, "q", {"q": good.q.transpose(1, 2)}),
        (TypeError, "k_pages", {"k_pages": good.k_pages.bfloat16()}),
        (
            ValueError,
            "k_pages",
            {"k_pages": good.k_pages[:, :12].contiguous(), "v_pages": good.v_pages[:, :12].contiguous()},
        ),
        (ValueError, "k_pages", {"k_pages": good.k_pages[..., :8].contiguous()}),
        (ValueError, "v_pages", {"v_pages": good.v_pages[1:]}),
        (TypeError, "page_table", {"page_table": good.page_table.long()}),
        (ValueError, "page_table", {"page_table": good.page_table[0]}),
        (TypeError, "rows", {"rows": good.rows.control}),
        (TypeError, "scale", {"scale": "1"}),
        (TypeError, "modifiers", {"modifiers": find_modifier("causal")()}),
        (ValueError, "alibi", {"modifiers": Modifiers([find_modifier("alibi")(torch.ones(3), per="head")])}),
        (
            ValueError,
            "prefix_lm",
            {"modifiers": Modifiers(mask=find_modifier("prefix_lm")(torch.ones(9).int(), per="sequence"))},
        ),
        (ValueError, "sinks", {"sinks": good.sinks[1:]}),
        (TypeError, "sinks", {"sinks": good.sinks.double()}),
        (ValueError, "gate", {"gate": good.gate[1:]}),
        (TypeError, "gate", {"gate": good.gate.half()}),
    ]
    for kind, name, changes in wrong:
        with pytest.raises(kind, match=rf"^{name}: "):
            call(**changes)


@pytest.mark.gpu
def test_attention_in_a_graph_follows_growing_lengths(small_splits: None) -> None:
    path = Path("cuda", torch.bfloat16)
    members = [Row(1, 1000), Row(4, 700), Row(1, 3)]
    batch = make_batch(members, path, Layer(16, 2, 128, 128, 64), max_short=4)
    modifiers, truth = modifier_case("soft-cap-in-a-window", batch.layer, 5, "cuda")
    # The graph is captured when rows are short.
    control = batch.rows.control.clone()
    live = replace(batch, rows=Rows(control, 3, 4, 4))
    control[6, :3] = 0
    live.attend(path, modifiers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = live.attend(path, modifiers)
    for positions in ([0, 0, 0], [100, 60, 1], [1000, 700, 3], [64, 500, 2]):
        control[6, :3] = torch.tensor(positions, dtype=torch.int32)
        o.fill_(torch.nan)
        graph.replay()
        then = replace(
            batch,
            members=[replace(row, position=p) for row, p in zip(members, positions, strict=True)],
            keys={
                line: (k[: p + row.tokens], v[: p + row.tokens])
                for (line, (k, v)), p, row in zip(batch.keys.items(), positions, members, strict=True)
            },
        )
        assert_close(str(positions), o, then.expected(truth)[0], path.dtype)


def move_far(batch: Batch) -> None:
    """Move the batch's pages behind 2^31 values of others, which are NaN."""
    values = batch.k_pages[0].numel()
    shift = (1 << 31) // values + 1
    for name in ("k_pages",) if batch.layer.is_latent else ("k_pages", "v_pages"):
        few = getattr(batch, name)
        pages = torch.full((shift + len(few), *few.shape[1:]), torch.nan, dtype=few.dtype, device=few.device)
        pages[shift:] = few
        setattr(batch, name, pages)
    batch.page_table += shift


@pytest.mark.gpu
def test_attention_reads_beyond_2_gi_values() -> None:
    path = Path("cuda", torch.bfloat16)
    batch = make_batch([Row(1, 100), Row(20, 60)], path, Layer(8, 2, 128, 128, 64), max_short=1)
    move_far(batch)
    modifiers, truth = modifier_case("causal", batch.layer, 4, "cuda")
    assert_close("o", batch.attend(path, modifiers)[0], batch.expected(truth)[0], path.dtype)
