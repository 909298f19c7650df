"""What the self-test computes for mixtures of experts: routes of a layer, and what its experts make of tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deltaline_kernels.checks import FP8, FP8_BLOCK
from deltaline_kernels.cpu.group import group_cpu
from deltaline_kernels.device.sizes import cdiv, count_tiles
from deltaline_kernels.moe import (
    SILU,
    Router,
    route_and_run_experts,
    route_and_run_experts_reference,
    route_tokens,
    route_tokens_reference,
    run_experts,
    run_experts_reference,
)
from deltaline_kernels.moe.plan import DIRECT_TOKENS, plan_tiles
from deltaline_kernels.selftest.shapes import Compared, Fill, Fills

TOKENS = (1, 6, 40)
# Choices per expert on average, in tiles of each size and sorted.
CHOICES_GPU = (6, 20, 36, 100)


def compare_moe(
    fills: Fills,
    num_tokens: int,
    router: Router,
    num_experts: int,
    hidden: int,
    inner: int,
    activation: str,
    limit: float,
    dtype: torch.dtype,
    *,
    in_fp8: bool = False,
) -> Iterator[Compared]:
    """Yield the name of each family, batch and kind of input, what was computed and what its reference computed."""
    for kind, fill in fills.items():
        device = fill(1).device
        bias = 2.0 * fill(num_experts).round() if router.scoring == "sigmoid" else None
        few = few_experts(router, num_experts)
        # Sums of about 1: those of ones are as large as their number.
        power = -1.0 if kind == "ones" else -0.5
        halves = 2 if activation == SILU else 1
        gate_up, of_first = draw_weights(fill, few, halves, inner, hidden, power, FP8 if in_fp8 else dtype)
        down, of_second = draw_weights(fill, few, 1, hidden, inner, power, FP8 if in_fp8 else dtype)
        label = f"{num_tokens} tokens, {kind}{', fp8' if in_fp8 else ''}"
        logits = draw_logits(fill, num_tokens, num_experts + router.shared_gate, router).to(dtype)
        starts = torch.tensor([0, max(1, num_tokens - 2)], dtype=torch.int32, device=device)
        routes = route_tokens(logits, router, bias, starts)
        want = route_tokens_reference(logits, router, bias, starts)
        others, none = compare_exactly([routes[1]], [want[1]])
        yield f"moe, routes, {label}", [routes[0], *others], [want[0], *none]
        if device.type != "cpu":
            total = num_experts + router.num_shared
            rows = plan_tiles(num_tokens, router.num_choices, total, dtype).rows
            yield f"moe, tiles, {label}", *compare_tiles(routes[1].flatten(), total, rows)
        weights, experts = routes[0], routes[1] % few
        x = fill(num_tokens, hidden).to(dtype)
        own = x, gate_up, down, weights, experts, activation, of_first, of_second, limit
        yield f"moe, experts, {label}", [run_experts(*own)], [run_experts_reference(*own)]
        if router.num_shared and num_tokens <= DIRECT_TOKENS:
            # As a layer calls both: the shared ones are computed by another kernel, before the routes are there.
            count, one_group = few - router.num_shared, replace(router, num_groups=1, top_groups=1)
            few_logits = logits[:, : count + router.shared_gate]
            few_bias = None if bias is None else bias[:count]
            whole = x, few_logits, one_group, gate_up, down, few_bias, starts, activation, of_first, of_second, limit
            yield f"moe, whole, {label}", [route_and_run_experts(*whole)], [route_and_run_experts_reference(*whole)]


def draw_logits(fill: Fill, num_tokens: int, num_logits: int, router: Router) -> Tensor:
    """Return logits `[T, num_logits]` whose choices are far apart or equal.

    Of what is nearly equal, rounding of scores would choose. Sums of two scores, of which groups are chosen, are so
    by chance: s(x) + s(-x) is 1 for every x. Of scores of 0, 1/2 and 1 they are exact.
    """
    drawn = fill(num_tokens, num_logits)
    if router.num_groups > 1 and router.scoring == "sigmoid":
        return 40.0 * drawn.round().clamp(-1.0, 1.0)
    return (64.0 * drawn).round().div(64.0)


def draw_weights(
    fill: Fill, num_experts: int, halves: int, rows: int, inputs: int, power: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return weights `[E, halves * rows, inputs]` whose products are about 1, and of those in FP8 their scales."""
    values = fill(num_experts, halves * rows, inputs)
    if dtype != FP8:
        return (values * inputs**power).to(dtype), None
    scales = fill(num_experts, halves * cdiv(rows, FP8_BLOCK), cdiv(inputs, FP8_BLOCK)).abs() + 0.5
    return values.to(FP8), scales * inputs**power


def few_experts(router: Router, num_experts: int) -> int:
    """Return how many experts there are: so many that a token's are some of them.

    How many a layer has is a constant of one kernel alone, which lists who has which, and is compared by itself.
    """
    return min(num_experts + router.num_shared, router.num_choices + 2)


def tokens_of_experts(router: Router, num_experts: int, device: torch.device | str) -> Sequence[int]:
    """Return the sizes of batches that are compared."""
    if torch.device(device).type == "cpu":
        return TOKENS
    return tokens_of_every_way(router.num_choices, few_experts(router, num_experts))


def tokens_of_every_way(choices: int, num_experts: int) -> list[int]:
    """Return the sizes of batches that a GPU computes choice by choice, in tiles of each size, sorted."""
    return [1, *(cdiv(mean * num_experts, choices) for mean in CHOICES_GPU)]


def compare_tiles(keys: Tensor, num_keys: int, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return tiles of so many rows of tokens that have the same key, and those that the CPU makes."""
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.device.group import group_triton

    num_tiles = count_tiles(len(keys), num_keys, rows)
    got = [keys.new_full((num_tiles,), -1), keys.new_full((num_tiles, rows), -1)]
    want = [part.cpu().clone() for part in got]
    group_triton(keys, num_keys, got[0], got[1])
    group_cpu(keys.cpu(), num_keys, want[0], want[1])
    return compare_exactly(got, [part.to(keys.device) for part in want])


def compare_exactly(got: list[Tensor], want: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return where integers are others than the wanted, 1 there and 0 elsewhere, and zeros.

    As they are, one that is near to a large one would pass.
    """
    others = [(one != other).float() for one, other in zip(got, want, strict=True)]
    return others, [torch.zeros_like(other) for other in others]
