"""add_lora and group_tokens: against the reference, and what no reference tells."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.lora_batches import make_batch
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import spread_slots_reference
from deltaline_kernels.lora import plan


def mixed(num_tokens: int, num_slots: int, seed: int = 0) -> list[int]:
    """Slots of tokens in no order, -1 among them."""
    return random.Random(seed).choices(range(-1, num_slots), k=num_tokens)


# Slots of the tokens, ranks of the slots, then what make_batch takes.
CASES: dict[str, tuple[list[int], list[list[int]], dict[str, Any]]] = {
    "one-token": ([1], [[4], [16]], {}),
    "one-adapter": ([0] * 17, [[16]], {}),
    "mixed-ranks": (mixed(40, 5), [[1], [3], [16], [17], [70]], {"sizes": (130,)}),
    "all-ranks": (mixed(30, 4), [[256], [1], [0], [64]], {"sizes": (20,), "inputs": 40}),
    "slices": (mixed(20, 3), [[8, 0, 3], [0, 0, 0], [2, 16, 1]], {"sizes": (33, 1, 70), "inputs": 70}),
    "rank-1": (mixed(9, 2), [[1], [1]], {"inputs": 1, "sizes": (1,)}),
    "odd": (mixed(19, 2), [[5], [7]], {"inputs": 131, "sizes": (67,), "padding": 1}),
    "factors": (mixed(20, 3), [[8, 2], [4, 0], [16, 16]], {"sizes": (40, 9), "factors": True}),
    "base-only": ([-1] * 5, [[4]], {}),
    "empty": ([], [[4]], {}),
    "not-a-slot": ([0, 3, -7, 1, 99], [[4], [4], [4]], {}),
    "many-slots": (mixed(40, 90), [[1 + slot % 8] for slot in range(90)], {"inputs": 33}),
    "large-tiles": (mixed(plan.FEW_TOKENS + 20, 3), [[16], [5], [33]], {"inputs": 50}),
    "dense-tiles": (mixed(plan.DENSE_TOKENS + 20, 3), [[64], [5], [70]], {"inputs": 50, "factors": True}),
    "long-inputs": (mixed(6, 2), [[16], [20]], {"inputs": 3000, "sizes": (10,)}),
}


@pytest.fixture(params=["two-launches", "dense", "pieces"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Every way of a GPU, whatever its table says; the last takes dense tiles piece by piece."""
    is_interpreted = isinstance(path, InterpretedPath)
    if request.param != "two-launches" and not path.serial:
        pytest.skip("on the CPU there is one way")
    if request.param == "pieces":
        if is_interpreted and path.dtype != torch.float32:
            pytest.skip("what differs by dtype is in the other ways, too")
        make_dense(monkeypatch, ())
    if request.param == "dense":
        if not is_interpreted and (path.device, path.dtype) != ("cuda", torch.bfloat16):
            pytest.skip("only bf16 on a GPU is dense")
        make_dense(monkeypatch, (path.dtype,), early=True)


def make_dense(monkeypatch: pytest.MonkeyPatch, dtypes: Sequence[torch.dtype], *, early: bool = False) -> None:
    """Have every batch in dense tiles, which those of `dtypes` compute whole, in several steps of ranks and inputs."""
    row = plan.DenseBucket(plan.ANY, plan.ANY, (32, 32, 4, 2), (32, 16, 4, 2, early, None))
    for name, value in {"TOKENS": 1, "RANK": 1, "DTYPES": dtypes, "BUCKETS": (row,)}.items():
        monkeypatch.setattr(plan, f"DENSE_{name}", value)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", CASES)
def test_lora_matches_the_reference(path: Path, case: str) -> None:
    token_slots, ranks, options = CASES[case]
    batch = make_batch(path, token_slots, ranks, **options)
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_have_a_dtype_of_their_own(path: Path, out_dtype: torch.dtype) -> None:
    batch = make_batch(path, mixed(20, 2), [[8, 3], [16, 40]], (33, 20), out_dtype=out_dtype)
    assert_close("out", batch.run(path), batch.exact(), out_dtype)


def test_reference_is_the_product_of_whole_matrices(path: Path) -> None:
    batch = make_batch(path, mixed(20, 3), [[8, 2], [4, 0], [16, 16]], (40, 9), factors=True, out_dtype=torch.float32)
    assert_close("out", batch.run_reference(), batch.exact(), torch.float32)


@pytest.mark.usefixtures("launches")
def test_programs_take_tiles_in_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHRINK_PROGRAMS", "EXPAND_PROGRAMS", "DENSE_PROGRAMS"):
        monkeypatch.setattr(plan, name, 1)
    batch = make_batch(path, mixed(100, 4), [[8, 3], [16, 40], [0, 0], [5, 1]], (33, 20))
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("launches")
def test_tiles_may_be_those_of_any_rank(path: Path) -> None:
    """More than a tile of tokens of one adapter, another one's last tile nearly empty; whatever tiles a batch has."""
    slots = [0] * 140 + [2, 1, -1, 0]
    batch = make_batch(path, slots, [[40, 3], [0, 17], [64, 0]], (33, 5), 40, factors=True)
    want = batch.exact()
    assert_close("out", batch.run(path), want, path.dtype)
    for rank in (1, 512):
        out = batch.clone().out
        tiles = path.group(batch.token_slots, batch.weights.num_slots, rank)
        path.add_grouped(batch.x, out, batch.weights, tiles)
        assert_close("out", out, want, path.dtype)


@pytest.mark.parametrize("steps", [1, 3])
def test_programs_take_blocks_of_one_slice(path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Slices that fill no program, in blocks that they don't fill either; all ranks at once, or one after the other."""
    table = tuple(replace(bucket, expand=(32, steps, 4, None)) for bucket in plan.BUCKETS)
    monkeypatch.setattr(plan, "BUCKETS", table)
    for rank in (16, 70):
        batch = make_batch(path, mixed(40, 2), [[rank, 3, 0], [2, rank, rank]], (100, 33, 70), factors=True)
        assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("num_tokens", [20, plan.FEW_TOKENS + 30])
def test_row_does_not_depend_on_its_neighbours(path: Path, num_tokens: int) -> None:
    slots = mixed(num_tokens, 3)
    ranks = [[16], [3], [20]]
    batch = make_batch(path, slots, ranks)
    first = batch.run(path)
    # Every other token keeps its adapter; what the others have and hold is new.
    others = [
        slot if t % 2 == 0 else new for t, (slot, new) in enumerate(zip(slots, mixed(num_tokens, 3, 1), strict=True))
    ]
    again = make_batch(path, others, ranks, seed=5)
    kept = torch.tensor([t for t in range(num_tokens) if t % 2 == 0], device=path.device)
    again.x[kept], again.out[kept] = batch.x[kept], batch.out[kept]
    second = replace(again, weights=batch.weights).run(path)
    assert torch.equal(first[kept].nan_to_num(7.0), second[kept].nan_to_num(7.0))
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("launches")
def test_repeat_is_equal(path: Path) -> None:
    batch = make_batch(path, mixed(70, 3), [[16], [3], [20]], inputs=700)
    assert torch.equal(batch.run(path), batch.run(path))


@pytest.mark.usefixtures("launches")
def test_sums_between_the_products_are_fp32(path: Path) -> None:
    """Rounded to 16 bits, 2049 and 2048, which cancel, would leave nothing."""
    batch = make_batch(path, [0] * 3, [[2]], (3,), 2, integers=True, out_dtype=torch.float32)
    batch.weights.a[0, 0] = torch.tensor([[2048.0, 1.0], [2048.0, 0.0]])
    batch.weights.b[0] = torch.tensor([[1.0] * 3, [-1.0] * 3])
    batch.x.fill_(1)
    assert torch.equal(batch.run(path), batch.exact().float())
    assert not torch.equal(batch.run(path), batch.out)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=str)
def test_a_token_that_is_not_finite_spoils_no_other(path: Path, wrong: float) -> None:
    batch = make_batch(path, [0] * 20, [[16]])
    whole = batch.run(path)
    batch.x[3, 5] = wrong
    spoilt = batch.run(path)
    others = [t for t in range(20) if t != 3]
    assert torch.equal(spoilt[others], whole[others])
    assert not spoilt[3].isfinite().any()


@pytest.mark.usefixtures("launches")
def test_weights_may_change_between_calls(path: Path) -> None:
    """Nothing is kept of a call: an adapter that takes another's slot, and its address, counts at once."""
    batch = make_batch(path, [0, 1, 0], [[16], [16]])
    batch.run(path)
    batch.weights.a[0], batch.weights.b[0] = batch.weights.a[1].clone(), batch.weights.b[1].clone()
    batch.weights.ranks[0], batch.weights.scales[0] = 9, 3.0
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


def test_magnitudes_make_dora(exact_path: Path) -> None:
    """out = m / |W + s B A| (W x + s B A x), as PEFT computes it, from factors that the loader computes once."""
    batch = make_batch(exact_path, [0, -1, 1, 0], [[8], [4]], inputs=50)
    weights = batch.weights
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(40, 50, generator=generator).to(exact_path.device)
    magnitude = torch.rand(2, 40, generator=generator).to(exact_path.device)
    adapted = []
    for slot, rank in enumerate([8, 4]):
        delta = weights.b[slot, :rank].T @ weights.a[slot, 0, :rank]
        adapted.append(base + weights.scales[slot, 0] * delta)
    factors = torch.stack([m / w.norm(dim=1) for m, w in zip(magnitude, adapted, strict=True)])
    x = batch.x.nan_to_num(0.5)
    out = x @ base.T
    want = out.clone()
    for t, slot in enumerate([0, -1, 1, 0]):
        if slot >= 0:
            want[t] = factors[slot] * (adapted[slot] @ x[t])
    exact_path.add_lora(x, out, replace(weights, factors=factors), batch.token_slots)
    assert_close("out", out, want, torch.float32)


def check_tiles(path: Path, token_slots: Sequence[int], num_slots: int, max_rank: int) -> None:
    tiles = path.group(torch.tensor(token_slots, dtype=torch.int32, device=path.device), num_slots, max_rank)
    wanted = []
    for slot in range(num_slots):
        own = [t for t, found in enumerate(token_slots) if found == slot]
        wanted += [(slot, own[i : i + tiles.rows]) for i in range(0, len(own), tiles.rows)]
    slots, tokens = tiles.slots.tolist(), tiles.tokens.tolist()
    assert slots == [slot for slot, _ in wanted] + [-1] * (tiles.num_tiles - len(wanted))
    for found, (_, own) in zip(tokens, wanted, strict=False):
        assert found == own + [-1] * (tiles.rows - len(own))


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "max_rank"),
    [
        (0, 1, 1),
        (1, 1, 16),
        (16, 1, 8),
        (17, 1, 512),
        (64, 16, 16),
        (65, 90, 8),
        (600, 3, 64),
        (2500, 7, 16),
        (2500, 7, 64),
    ],
    ids=str,
)
def test_tokens_are_grouped_in_their_order(exact_path: Path, num_tokens: int, num_slots: int, max_rank: int) -> None:
    for slots in (
        mixed(num_tokens, num_slots),
        [num_slots - 1] * num_tokens,
        [-1] * num_tokens,
        [t % (num_slots + 4) - 2 for t in range(num_tokens)],
    ):
        check_tiles(exact_path, slots, num_slots, max_rank)


@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [
        ([], 0),
        ([], 5),
        ([1], 1),
        ([1] * 64, 64),
        ([1] * 65, 65),
        ([3, 0, 0, 1, 5, 0], 9),
        ([0, 0, 4, 0], 20),
        ([2] * 70 + [500, 0, 300], 1000),
        ([0] * 200 + [129], 129),
    ],
    ids=lambda value: f"{len(value)}-rows" if isinstance(value, list) else str(value),
)
def test_tokens_have_the_adapters_of_their_rows(exact_path: Path, lengths: list[int], num_tokens: int) -> None:
    device = exact_path.device
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    row_slots = torch.tensor(mixed(len(lengths), 9), dtype=torch.int32, device=device)
    wanted = [slot for slot, length in zip(row_slots.tolist(), lengths, strict=True) for _ in range(length)]
    found = exact_path.spread(row_slots, starts, num_tokens)
    assert found.tolist() == wanted + [-1] * (num_tokens - len(wanted))
    assert torch.equal(found, spread_slots_reference(row_slots, starts, num_tokens))
