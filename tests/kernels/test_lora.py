"""add_lora and group_tokens: against the reference, and what no reference tells."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.lora_batches import make_batch
from kernels.paths import InterpretedPath, Path
from kernels.tolerance import assert_close

from deltaline_kernels import LoraWeights, add_lora, group_tokens, spread_slots, spread_slots_reference
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
    "long-inputs": (mixed(6, 2), [[16], [20]], {"inputs": 3000, "sizes": (10,)}),
}


# Two rows of one token.
SPREAD_SLOTS, SPREAD_STARTS = torch.zeros(2, dtype=torch.int32), torch.arange(3, dtype=torch.int32)


@pytest.fixture(params=["two-launches", "one-launch"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Both ways of a GPU, whatever its table says."""
    fused = (128, 256, 4) if request.param == "one-launch" else None
    is_triton = path.device == "cuda" or isinstance(path, InterpretedPath)
    if fused and not (is_triton and path.dtype != torch.float32):
        pytest.skip("only 16-bit models on a GPU have two ways")
    monkeypatch.setattr(plan, "BUCKETS", tuple(replace(bucket, fused=fused) for bucket in plan.BUCKETS))


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
    for name in ("SHRINK_PROGRAMS", "EXPAND_PROGRAMS"):
        monkeypatch.setattr(plan, name, 1)
    batch = make_batch(path, mixed(100, 4), [[8, 3], [16, 40], [0, 0], [5, 1]], (33, 20))
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.parametrize("steps", [1, 3])
def test_programs_take_blocks_of_one_slice(path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Slices that fill no program, in blocks that they don't fill either; all ranks at once, or one after the other."""
    table = tuple(replace(bucket, fused=None, expand=(32, steps, 4, None)) for bucket in plan.BUCKETS)
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


def test_lora_records_no_gradients(exact_path: Path) -> None:
    batch = make_batch(exact_path, [0, 1], [[4], [4]])
    weights = replace(batch.weights, a=torch.nn.Parameter(batch.weights.a), b=torch.nn.Parameter(batch.weights.b))
    assert not replace(batch, weights=weights).run(exact_path).requires_grad


def check_tiles(path: Path, token_slots: Sequence[int], num_slots: int) -> None:
    tiles = path.group(torch.tensor(token_slots, dtype=torch.int32, device=path.device), num_slots)
    wanted = []
    for slot in range(num_slots):
        own = [t for t, found in enumerate(token_slots) if found == slot]
        wanted += [(slot, own[i : i + tiles.rows]) for i in range(0, len(own), tiles.rows)]
    slots, tokens = tiles.slots.tolist(), tiles.tokens.tolist()
    assert slots == [slot for slot, _ in wanted] + [-1] * (tiles.num_tiles - len(wanted))
    for found, (_, own) in zip(tokens, wanted, strict=False):
        assert found == own + [-1] * (tiles.rows - len(own))


@pytest.mark.parametrize(
    ("num_tokens", "num_slots"),
    [(0, 1), (1, 1), (16, 1), (17, 1), (64, 16), (65, 90), (600, 3), (2500, 7)],
    ids=str,
)
def test_tokens_are_grouped_in_their_order(exact_path: Path, num_tokens: int, num_slots: int) -> None:
    check_tiles(exact_path, mixed(num_tokens, num_slots), num_slots)
    check_tiles(exact_path, [num_slots - 1] * num_tokens, num_slots)
    check_tiles(exact_path, [-1] * num_tokens, num_slots)
    check_tiles(exact_path, [t % (num_slots + 4) - 2 for t in range(num_tokens)], num_slots)


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


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "x: expected a tensor, got list", {"x": [1.0]}),
    (TypeError, "x: expected torch.float32, got torch.bfloat16", {"x": torch.zeros(2, 6).bfloat16()}),
    (ValueError, r"x: expected shape \[\*, 6\], got \[2, 5\]", {"x": torch.zeros(2, 5)}),
    (ValueError, r"x: expected packed rows", {"x": torch.zeros(6, 2).t()}),
    (ValueError, r"out: expected shape \[2, 5\], got \[3, 5\]", {"out": torch.zeros(3, 5)}),
    (TypeError, "out: expected torch.float32 or", {"out": torch.zeros(2, 5).double()}),
    (TypeError, "weights: expected LoraWeights, got tuple", {"weights": ()}),
    (TypeError, "tiles: expected AdapterTiles, got NoneType", {"tiles": None}),
    (
        ValueError,
        "tiles: expected those of 2 tokens and 3 slots, got those of 1 and 3",
        {"tiles": group_tokens(torch.zeros(1, dtype=torch.int32), 3)},
    ),
    (
        ValueError,
        "tiles: expected those of 2 tokens and 3 slots, got those of 2 and 4",
        {"tiles": group_tokens(torch.zeros(2, dtype=torch.int32), 4)},
    ),
]


def good_weights() -> dict[str, Any]:
    return {
        "a": torch.zeros(3, 2, 4, 6),
        "b": torch.zeros(3, 4, 5),
        "ranks": torch.zeros(3, 2, dtype=torch.int32),
        "scales": torch.zeros(3, 2),
        "sizes": (2, 3),
        "factors": torch.zeros(3, 5),
    }


@pytest.mark.parametrize(("error", "message", "change"), WRONG, ids=[message for _, message, _ in WRONG])
def test_lora_names_the_wrong_argument(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "x": torch.zeros(2, 6),
        "out": torch.zeros(2, 5),
        "weights": LoraWeights(**good_weights()),
        "tiles": group_tokens(torch.zeros(2, dtype=torch.int32), 3),
    }
    add_lora(**good)
    with pytest.raises(error, match="^" + message):
        add_lora(**(good | change))


WRONG_WEIGHTS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "a: expected a tensor, got NoneType", {"a": None}),
    (TypeError, "a: expected torch.float32", {"a": torch.zeros(3, 2, 4, 6).double()}),
    (ValueError, r"a: expected shape \[\*, 2, \*, \*\]", {"a": torch.zeros(3, 1, 4, 6)}),
    (ValueError, "a: expected at least 1 slot and 1 input, and a rank of 1..512", {"a": torch.zeros(3, 2, 513, 6)}),
    (ValueError, "a: expected at least 1 slot", {"a": torch.zeros(0, 2, 4, 6)}),
    (ValueError, "a: expected a contiguous tensor", {"a": torch.zeros(3, 2, 6, 4).transpose(2, 3)}),
    (ValueError, r"b: expected shape \[3, 4, 5\], got \[3, 5, 4\]", {"b": torch.zeros(3, 5, 4)}),
    (TypeError, "b: expected torch.float32, got torch.float16", {"b": torch.zeros(3, 4, 5).half()}),
    (TypeError, "ranks: expected torch.int32, got torch.int64", {"ranks": torch.zeros(3, 2, dtype=torch.int64)}),
    (ValueError, r"scales: expected shape \[3, 2\]", {"scales": torch.zeros(3)}),
    (TypeError, "sizes: expected a tuple of integers", {"sizes": [2, 3]}),
    (ValueError, "sizes: expected at least one slice", {"sizes": ()}),
    (ValueError, "sizes: expected at least one slice of at least 1 output", {"sizes": (5, 0)}),
    (ValueError, r"factors: expected shape \[3, 5\]", {"factors": torch.zeros(3, 4)}),
]


@pytest.mark.parametrize(
    ("error", "message", "change"), WRONG_WEIGHTS, ids=[message for _, message, _ in WRONG_WEIGHTS]
)
def test_weights_name_the_wrong_argument(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    LoraWeights(**good_weights())
    with pytest.raises(error, match="^" + message):
        LoraWeights(**(good_weights() | change))


def test_group_tokens_names_the_wrong_argument() -> None:
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^token_slots: expected a tensor, got list"):
        group_tokens([0, 1], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^token_slots: expected torch\.int32, got torch\.int64"):
        group_tokens(slots.long(), 2)
    with pytest.raises(ValueError, match=r"^num_slots: expected at least 1, got 0"):
        group_tokens(slots, 0)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "row_slots: expected a tensor, got list", ([0], SPREAD_STARTS, 2)),
        (TypeError, "row_slots: expected torch.int32", (SPREAD_SLOTS.long(), SPREAD_STARTS, 2)),
        (ValueError, r"query_start_loc: expected shape \[3\], got \[2\]", (SPREAD_SLOTS, SPREAD_STARTS[:2], 2)),
        (TypeError, "num_tokens: expected an integer, got float", (SPREAD_SLOTS, SPREAD_STARTS, 2.0)),
        (ValueError, "num_tokens: expected at least 0, got -1", (SPREAD_SLOTS, SPREAD_STARTS, -1)),
    ],
    ids=str,
)
def test_rows_that_cannot_be_spread_are_refused(
    error: type[Exception], message: str, arguments: tuple[Any, Any, Any]
) -> None:
    with pytest.raises(error, match="^" + message):
        spread_slots(*arguments)
