"""What the self-test computes for mixtures of experts: routes of a layer, and what its experts make of tokens."""

from collections.abc import Iterator

import torch

from deltaline_kernels.moe import (
    Router,
    route_tokens,
    route_tokens_reference,
    run_experts,
    run_experts_reference,
)
from deltaline_kernels.selftest.shapes import Compared, Fill

# Tokens of batches of every way, as few experts have them: choice by choice, tiles of each size, grouped products.
TOKENS, TOKENS_GPU = (1, 6, 40), (1, 6, 20, 40, 130)


def compare_moe(
    fills: dict[str, Fill], router: Router, num_experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> Iterator[Compared]:
    """Yield the name of each family, batch and kind of input, what was computed and what its reference computed.

    Of the experts, which are no constant of a kernel, there are only so many that a token's are some of them.
    """
    for kind, fill in fills.items():
        device = fill(1).device
        bias = fill(num_experts) if router.scoring == "sigmoid" else None
        few = min(num_experts + router.num_shared, router.num_choices + 2)
        # Sums of about 1: those of ones are as large as their number.
        power = -1.0 if kind == "ones" else -0.5
        gate_up = (fill(few, 2 * inner, hidden) * hidden**power).to(dtype)
        down = (fill(few, hidden, inner) * inner**power).to(dtype)
        for num_tokens in TOKENS if device.type == "cpu" else TOKENS_GPU:
            label = f"{num_tokens} tokens, {kind}"
            logits = fill(num_tokens, num_experts + router.shared_gate)
            starts = torch.tensor([0, max(1, num_tokens - 2)], dtype=torch.int32, device=device)
            routes = route_tokens(logits, router, bias, starts)
            yield f"moe, routes, {label}", list(routes), list(route_tokens_reference(logits, router, bias, starts))
            weights, experts = routes[0], routes[1] % few
            x = fill(num_tokens, hidden).to(dtype)
            own = x, gate_up, down, weights, experts
            yield f"moe, experts, {label}", [run_experts(*own)], [run_experts_reference(*own)]
