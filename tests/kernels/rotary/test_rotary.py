"""rotate_and_store against its reference; only what is a row's own is ever written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.rotary_batches import Heads, RotaryBatch, Row, bits, make_rotary_batch
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import Rows

CASES: dict[str, list[Row]] = {
    "one-token": [Row(1)],
    "decode": [Row(1, 5), Row(1, 40), Row(1), Row(1, 15), Row(1, 16)],
    "across-pages": [Row(4, 14), Row(3, 31), Row(2, 16)],
    "long": [Row(1, 3), Row(37, 9), Row(17)],
    "empty": [Row(0), Row(0, 7), Row(3, 2), Row(0, 16), Row(0), Row(2, 15), Row(0)],
    "skipped": [
        Row(2, skipped="padding"),
        Row(3, 15),
        Row(1, 4, skipped="nowhere"),
        Row(2, skipped="null"),
        Row(1, 33),
    ],
    "all-skipped": [Row(1, skipped="padding"), Row(2, 20, skipped="padding")],
    "no-rows": [],
}
SIZES = {
    "model": Heads(HQ=16, HKV=2, D=256, DV=256, R=64, gate=256),
    "one-head": Heads(HQ=1, HKV=1),
    "ratio-7": Heads(HQ=14, HKV=2, D=64, DV=64, R=64),
    "many-kv-heads": Heads(HQ=34, HKV=17, D=128, DV=128, R=32),
    "unequal": Heads(D=24, DV=40, R=24, gate=24),
    "narrow-values": Heads(D=192, DV=128, R=64),
    "rest-of-a-turn": Heads(D=30, DV=3, R=12),
    "odd": Heads(HQ=3, HKV=3, D=13, DV=1, R=6, page_size=3, gate=2),
    "one-pair-of-many": Heads(HQ=32, HKV=8, D=128, DV=128, R=2),
    "pairs": Heads(D=2, DV=5, R=2, page_size=1),
    "latents": Heads(HQ=8, HKV=1, D=64, DV=512, R=64, is_latent=True),
    "odd-latents": Heads(HQ=3, HKV=1, D=5, DV=33, R=2, page_size=3, is_latent=True),
    "every-channel": Heads(HQ=6, HKV=1, D=256, DV=256, R=256),
}


def check(batch: RotaryBatch, path: Path) -> None:
    """Fail unless outputs and pages are the reference's, and the bits of everything else are what they were."""
    want = batch.clone()
    want_q = want.run_reference()
    before = batch.clone()
    q = batch.run(path)
    assert q.is_contiguous() and q.dtype == path.dtype
    assert_close("q", q, want_q, path.dtype)
    live = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    for i, line in enumerate(batch.rows.write_line.tolist()):
        live[slice(*batch.rows.query_start_loc[i : i + 2].tolist())] = line > 0
    assert not q[~live].any() and q[live].isfinite().all()
    for name in ("k_pages", "v_pages"):
        got, old, new = (getattr(side, name) for side in (batch, before, want))
        assert got[batch.own].isfinite().all()
        assert_close(name, got[batch.own], new[batch.own], path.dtype)
        assert torch.equal(bits(got)[~batch.own], bits(old)[~batch.own]), f"{name}: another position was written"
    assert torch.equal(bits(batch.v_pages), bits(want.v_pages)), "v_pages: values are kept as they come"


@pytest.mark.parametrize("case", CASES)
def test_rotary_matches_the_reference(path: Path, case: str) -> None:
    check(make_rotary_batch(CASES[case], path), path)


@pytest.mark.parametrize("sizes", SIZES)
def test_rotary_of_any_size_matches_the_reference(path: Path, sizes: str) -> None:
    rows = [Row(1, 6), Row(2, 15), Row(1, skipped="padding"), Row(5)]
    check(make_rotary_batch(rows, path, SIZES[sizes]), path)


@pytest.mark.parametrize("sizes", ["model", "ratio-7", "many-kv-heads", "unequal", "narrow-values"])
def test_rotary_of_aligned_tokens_matches_the_reference(path: Path, sizes: str) -> None:
    """Tokens that begin at a multiple of 16 bytes, as a projection leaves them: other loads are made of them."""
    rows = [Row(1, 6), Row(2, 15), Row(1, skipped="nowhere"), Row(5)]
    check(make_rotary_batch(rows, path, SIZES[sizes], padding=0), path)


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_rotary_crosses_pages_of_any_size(path: Path, page_size: int) -> None:
    rows = [Row(5, page_size - 2), Row(18, 2 * page_size - 1), Row(1, page_size - 1), Row(1, page_size)]
    check(make_rotary_batch(rows, path, Heads(HQ=2, HKV=1, page_size=page_size)), path)


@pytest.mark.parametrize("norms", [(False, False), (True, False), (False, True)], ids=["none", "q", "k"])
def test_rotary_without_norms(path: Path, norms: tuple[bool, bool]) -> None:
    batch = make_rotary_batch([Row(1, 6), Row(5, 13)], path, norms=norms)
    before = batch.q.clone(), batch.k.clone()
    own, heads = batch.clone(), batch.heads
    check(batch, path)
    q = own.run(path)
    # What is neither normalised nor turned is not touched.
    if not norms[0]:
        assert torch.equal(q[:6, :, heads.R :], before[0][:6, :, heads.R :])
    if not norms[1]:
        kept = own.k_pages[own.own][..., heads.R :].flatten(1).double().sort(0).values
        assert torch.equal(kept, before[1][:6, :, heads.R :].flatten(1).double().sort(0).values)


@pytest.mark.parametrize("num_rows", [64, 65, 5000])
def test_rotary_finds_the_row_among_many(path: Path, num_rows: int) -> None:
    """Where rows are many, empty and skipped ones among them, a token's row is found in two steps."""
    skipped = {5: "padding", 6: "nowhere"}
    # In Triton's interpreter a token takes long.
    often = num_rows // 6 if isinstance(path, InterpretedPath) else 7
    lengths = [(2, 0, 0, 1, 1)[i % often] if i % often < 5 else 0 for i in range(num_rows)]
    rows = [Row(lengths[i], i % 40, skipped.get(i % 11, "")) for i in range(num_rows - 20)]
    rows += [Row(0)] * 20
    check(make_rotary_batch(rows, path, Heads(HQ=1, HKV=1, D=4, DV=4, R=2)), path)


def test_rotary_of_a_part_of_the_rows(path: Path) -> None:
    """A view of the rows begins behind the first token: what lies before it is a token of no row."""
    batch = make_rotary_batch([Row(2, 3), Row(9, 14), Row(7)], path)
    whole, part = batch.clone(), replace(batch, rows=batch.rows.long())
    want = whole.run(path)
    q = part.run(path)
    assert part.rows.num_rows == 2
    assert torch.equal(q[2:], want[2:]) and not q[:2].any()
    assert int((bits(part.v_pages) != bits(whole.v_pages)).any(-1).any(-1).sum()) == 2


def test_rotary_repeats_bitwise_and_neighbours_do_not_matter(path: Path) -> None:
    batch = make_rotary_batch([Row(1, 3), Row(9, 14), Row(1)], path)
    first, again = batch.clone(), batch.clone()
    q = first.run(path)
    assert torch.equal(q, again.run(path))
    assert torch.equal(bits(first.k_pages), bits(again.k_pages))
    others = replace(batch.clone(), q=batch.q.clone(), k=batch.k.clone())
    for tensor in (others.q, others.k):
        tensor[1:10] = torch.nan
    changed = others.run(path)
    assert torch.equal(changed[:1], q[:1]) and torch.equal(changed[10:], q[10:])
    assert changed[1:10].isnan().all()


def test_a_verify_is_overwritten_by_what_was_accepted(path: Path) -> None:
    """Rejected drafts need no replay: the next row's tokens lie where theirs were."""
    batch = make_rotary_batch([Row(6, 13)], path, tokens_of_no_row=0)
    drafts, whole = batch.clone(), batch.clone()
    want = whole.run(path)

    def step(tokens: slice, position: int, of: RotaryBatch) -> Any:
        n = tokens.stop - tokens.start
        rows = make_rotary_batch([Row(n, position)], path, tokens_of_no_row=0).rows
        rows.control[2] = batch.rows.control[2]
        q, k, v = (getattr(of, name)[tokens] for name in "qkv")
        return replace(drafts, q=q, k=k, v=v, rows=rows).run(path)

    other = make_rotary_batch([Row(6, 13)], path, seed=9, tokens_of_no_row=0)
    accepted = step(slice(0, 3), 13, batch)
    step(slice(3, 6), 16, other)
    following = step(slice(3, 6), 16, batch)
    assert_close("q", torch.cat((accepted, following)), want, path.dtype)
    assert_close("k_pages", drafts.k_pages, whole.k_pages, path.dtype)
    assert torch.equal(bits(drafts.v_pages), bits(whole.v_pages))


def test_rotary_takes_rows_that_are_built_without_positions(path: Path) -> None:
    batch = make_rotary_batch([Row(3), Row(1)], path)
    lines, zeros = batch.rows.write_line.tolist(), [0, 0]
    rows = Rows.build([3, 1], lines, lines, [3, 1], zeros, zeros, max_short=4, device=path.device)
    assert torch.equal(replace(batch, rows=rows).run(path), batch.clone().run(path))
