"""lora_shrink and lora_expand against loops written from vLLM's semantics, and its mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rigs.kernels.field_lora import field_expand, field_shrink, metadata
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import lora_expand, lora_shrink
from deltaline_kernels.lora import plan

# Slots of the tokens, number of slots, rank, outputs of each slice.
CASES: dict[str, tuple[list[int], int, int, tuple[int, ...]]] = {
    "one-token": ([0], 1, 8, (16,)),
    "mixed": (random.Random(0).choices(range(-1, 5), k=40), 5, 16, (40,)),
    "slices": (random.Random(1).choices(range(-1, 3), k=20), 4, 8, (33, 16, 16)),
    "rank-1": ([1, -1, 0, 1], 2, 1, (5, 3)),
    "odd": ([2] * 19 + [-1], 3, 20, (131,)),
    "rank-64": ([1] * 140, 2, 64, (24,)),
    "none-of-base": ([3, 1, 2, 3], 4, 16, (40,)),
}
INPUTS = 70


def draw(path: Path, *size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(path.device, path.dtype)


def weights_of(path: Path, num_slots: int, sizes: Sequence[int], rank: int, *, shrink: bool) -> list[Tensor]:
    shapes = [(rank, INPUTS) if shrink else (size, rank) for size in sizes]
    return [draw(path, num_slots, *shape, seed=i) / 8 for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("case", CASES)
def test_shrink_matches_the_loops(path: Path, case: str) -> None:
    check_shrink(path, *CASES[case])


def check_shrink(path: Path, slots: list[int], num_slots: int, rank: int, sizes: tuple[int, ...]) -> None:
    x = draw(path, len(slots), INPUTS)
    weights = weights_of(path, num_slots, sizes, rank, shrink=True)
    out = torch.full((len(sizes), len(slots), rank), torch.nan, device=path.device)
    lora_shrink(x, weights, out, **metadata(slots, num_slots, path.device), scaling=0.5)
    assert_close("out", out, field_shrink(x, weights, slots, 0.5), torch.float32)


@pytest.mark.parametrize("add_inputs", [True, False], ids=["add", "overwrite"])
@pytest.mark.parametrize("case", CASES)
def test_expand_matches_the_loops(path: Path, case: str, add_inputs: bool) -> None:
    check_expand(path, *CASES[case], add_inputs=add_inputs)


def check_expand(
    path: Path, slots: list[int], num_slots: int, rank: int, sizes: tuple[int, ...], *, add_inputs: bool
) -> None:
    s = draw(path, len(sizes), len(slots), rank).float()
    weights = weights_of(path, num_slots, sizes, rank, shrink=False)
    out = draw(path, len(slots), sum(sizes) + 5, seed=9)
    want = field_expand(s, weights, out, slots, 3, add_inputs)
    before = out.clone()
    lora_expand(s, weights, out, **metadata(slots, num_slots, path.device), offset_start=3, add_inputs=add_inputs)
    assert_close("out", out, want, path.dtype)
    # Other columns and tokens without an adapter keep their bits.
    base = [t for t, slot in enumerate(slots) if slot == -1]
    assert torch.equal(out[base], before[base])
    assert torch.equal(out[:, :3], before[:, :3]) and torch.equal(out[:, -2:], before[:, -2:])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [64, 70, 256])
def test_many_tokens_of_high_rank_match_the_loops(rank: int) -> None:
    """In dense tiles, where the other tests here have small ones."""
    slots = random.Random(2).choices(range(-1, 3), k=plan.DENSE_TOKENS + 50)
    path = Path("cuda", torch.bfloat16)
    check_shrink(path, slots, 3, rank, (300, 24))
    for add_inputs in (True, False):
        check_expand(path, slots, 3, rank, (300, 24), add_inputs=add_inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_expand_takes_sums_and_outputs_of_any_dtype(path: Path, dtype: torch.dtype) -> None:
    """Several slices whose weights have another dtype than the outputs: others read memory in the wrong one."""
    slots = [0, 1, -1, 1]
    weights = weights_of(path, 2, (9, 12), 8, shrink=False)
    for sums_dtype in (dtype, torch.float32):
        s = draw(path, 2, 4, 8).to(sums_dtype)
        out = draw(path, 4, 21).to(dtype)
        want = field_expand(s, weights, out, slots, 0, True)
        lora_expand(s, weights, out, **metadata(slots, 2, path.device), add_inputs=True)
        assert_close("out", out, want, dtype)


def test_weights_may_have_a_dimension_of_one(exact_path: Path) -> None:
    slots, where = [0, 1], metadata([0, 1], 2, exact_path.device)
    a = weights_of(exact_path, 2, (9,), 8, shrink=True)
    b = weights_of(exact_path, 2, (9,), 8, shrink=False)
    x = draw(exact_path, 2, INPUTS)
    results = []
    for wide in (False, True):
        s = torch.full((1, 2, 8), torch.nan, device=exact_path.device)
        out = torch.zeros(2, 9, device=exact_path.device)
        lora_shrink(x, [w[:, None] if wide else w for w in a], s, **where, scaling=1.0)
        lora_expand(s, [w[:, None] if wide else w for w in b], out, **where, add_inputs=True)
        results.append((s, out))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert_close("s", results[0][0], field_shrink(x, a, slots, 1.0), torch.float32)


def test_tokens_of_a_larger_graph_are_not_computed(exact_path: Path) -> None:
    """Behind the tokens of this step the mapping says what it said before; counts and starts don't name those."""
    slots, spare = [1, 0, 1], 3
    where = metadata(slots, 2, exact_path.device, spare=spare)
    a = weights_of(exact_path, 2, (9,), 8, shrink=True)
    b = weights_of(exact_path, 2, (9,), 8, shrink=False)
    x = draw(exact_path, 6, INPUTS)
    s = torch.full((1, 6, 8), torch.nan, device=exact_path.device)
    lora_shrink(x, a, s, **where, scaling=1.0)
    assert_close("s", s[:, :3], field_shrink(x[:3], a, slots, 1.0), torch.float32)
    assert not s[:, 3:].any()
    out = torch.full((6, 9), 2.0, device=exact_path.device)
    lora_expand(s, b, out, **where, add_inputs=False)
    assert (out[3:] == 2).all() and not (out[:3] == 2).any()


def test_without_an_adapter_nothing_is_written(exact_path: Path) -> None:
    where = metadata([-1, -1], 2, exact_path.device)
    s = torch.full((1, 2, 8), torch.nan, device=exact_path.device)
    lora_shrink(draw(exact_path, 2, INPUTS), weights_of(exact_path, 2, (9,), 8, shrink=True), s, **where, scaling=1.0)
    assert s.isnan().all()
    out = torch.full((2, 9), torch.nan, device=exact_path.device)
    lora_expand(s, weights_of(exact_path, 2, (9,), 8, shrink=False), out, **where)
    assert out.isnan().all()


def test_only_active_adapters_count(exact_path: Path) -> None:
    where = metadata([0, 1, 2, 2], 3, exact_path.device) | {"num_active_loras": 2}
    a = weights_of(exact_path, 3, (9,), 8, shrink=True)
    x = draw(exact_path, 4, INPUTS)
    s = torch.full((1, 4, 8), torch.nan, device=exact_path.device)
    lora_shrink(x, a, s, **where, scaling=1.0)
    assert_close("s", s, field_shrink(x, a, [0, 1, -1, -1], 1.0), torch.float32)


def test_what_is_added_is_rounded_once(path: Path) -> None:
    """Not to the dtype of the weights first: 257 is no bf16, 2049 no fp16."""
    for delta in (257.0, 2049.0):
        s = torch.full((1, 1, 1), delta, device=path.device)
        b = torch.ones(1, 4, 1, dtype=path.dtype, device=path.device)
        out = torch.full((1, 4), 1.0, dtype=path.dtype, device=path.device)
        lora_expand(s, [b], out, **metadata([0], 1, path.device), add_inputs=True)
        assert (out.double() == torch.tensor(1.0 + delta).to(path.dtype).double().item()).all()


@pytest.mark.gpu
def test_functions_run_in_a_cuda_graph() -> None:
    """A replay follows what the engine's tensors hold by then."""
    path = Path("cuda", torch.bfloat16)
    num_tokens, num_slots = 40, 4
    a = weights_of(path, num_slots, (33, 16), 16, shrink=True)
    b = weights_of(path, num_slots, (33, 16), 16, shrink=False)
    x, before = draw(path, num_tokens, INPUTS), draw(path, num_tokens, 49, seed=4)
    s, out = torch.zeros(2, num_tokens, 16, device="cuda"), before.clone()
    where = metadata([0] * num_tokens, num_slots, "cuda")

    def run() -> None:
        lora_shrink(x, a, s, **where, scaling=0.5)
        lora_expand(s, b, out, **where, add_inputs=True)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        slots = random.Random(seed).choices(range(-1, num_slots), k=num_tokens)
        for name, tensor in metadata(slots, num_slots, "cuda").items():
            where[name].copy_(tensor)
        out.copy_(before)
        graph.replay()
        sums = field_shrink(x, a, slots, 0.5)
        assert_close("s", s, sums, torch.float32)
        assert_close("out", out, field_expand(sums, b, before, slots, 0, True), torch.bfloat16)


def good(function: Callable[..., None]) -> dict[str, Any]:
    where = metadata([0, 1, -1], 2)
    if function is lora_shrink:
        weights = {"lora_a_weights": [torch.zeros(2, 4, 6), torch.zeros(2, 4, 6)]}
        return {"inputs": torch.zeros(3, 6), **weights, "output_tensor": torch.zeros(2, 3, 4), **where, "scaling": 1.0}
    weights = {"lora_b_weights": [torch.zeros(2, 5, 4), torch.zeros(2, 7, 4)]}
    return {"inputs": torch.zeros(2, 3, 4), **weights, "output_tensor": torch.zeros(3, 12), **where}


S, E, zeros = lora_shrink, lora_expand, torch.zeros
ints = torch.zeros(3, dtype=torch.int32)
WRONG: list[tuple[Callable[..., None], type[Exception], str, dict[str, Any]]] = [
    (S, ValueError, "inputs: expected shape .tokens, in=6., got .3, 5.", {"inputs": torch.zeros(3, 5)}),
    (S, TypeError, "inputs: expected torch.float32 as lora_a_weights have", {"inputs": torch.zeros(3, 6).half()}),
    (S, TypeError, "lora_a_weights: expected a list of tensors", {"lora_a_weights": torch.zeros(2, 4, 6)}),
    (S, ValueError, "lora_a_weights: expected one shape", {"lora_a_weights": [zeros(2, 4, 6), zeros(2, 3, 6)]}),
    (S, ValueError, r"lora_a_weights\[0\]: expected values and a rank", {"lora_a_weights": [zeros(2, 513, 6)] * 2}),
    (S, ValueError, "output_tensor: expected shape .slices=2, tokens=3, rank=4.", {"output_tensor": torch.zeros(3, 4)}),
    (S, TypeError, "scaling: expected a number, got None", {"scaling": None}),
    (S, ValueError, r"token_lora_mapping: expected shape \[3\]", {"token_lora_mapping": ints[:2]}),
    (S, ValueError, "token_indices_sorted_by_lora_ids: expected shape", {"token_indices_sorted_by_lora_ids": ints[:2]}),
    (S, TypeError, "lora_ids: expected torch.int32", {"lora_ids": ints.long()}),
    (S, ValueError, r"num_tokens_per_lora: expected shape \[3\]", {"num_tokens_per_lora": ints[:2]}),
    (S, ValueError, r"lora_token_start_loc: expected shape \[4\]", {"lora_token_start_loc": ints}),
    (S, ValueError, "num_active_loras: expected 0..3, got 4", {"num_active_loras": 4}),
    (S, TypeError, "no_lora_flag_cpu: expected a tensor", {"no_lora_flag_cpu": False}),
    (E, ValueError, "inputs: expected shape .slices=2, tokens, rank=4.", {"inputs": torch.zeros(1, 3, 4)}),
    (E, ValueError, "lora_b_weights: expected one number", {"lora_b_weights": [zeros(2, 5, 4), zeros(2, 7, 3)]}),
    (
        E,
        TypeError,
        r"lora_b_weights\[1\]: expected torch.float32 as the first",
        {"lora_b_weights": [zeros(2, 5, 4), zeros(2, 7, 4).half()]},
    ),
    (E, ValueError, "output_tensor: expected at least 12 columns, got 11", {"output_tensor": torch.zeros(3, 11)}),
    (E, ValueError, "output_tensor: expected at least 13 columns, got 12", {"offset_start": 1}),
    (E, ValueError, "offset_start: expected at least 0", {"offset_start": -1}),
]


@pytest.mark.parametrize(("function", "error", "message", "change"), WRONG, ids=[message for _, _, message, _ in WRONG])
def test_the_wrong_argument_is_named(
    function: Callable[..., None], error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    function(**good(function))
    with pytest.raises(error, match="^" + message):
        function(**(good(function) | change))
