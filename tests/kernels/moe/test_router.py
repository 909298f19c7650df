"""Routing, against the reference; the interpreter runs these again with the Triton kernel."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import Router, route_tokens_reference

# A router, the experts, and whether there is a bias.
CASES: dict[str, tuple[Router, int, bool]] = {
    "softmax": (Router(3), 8, False),
    "not-normalized": (Router(3, normalize=False, scale=2.5), 8, False),
    "odd": (Router(5), 11, False),
    "all": (Router(6), 6, False),
    "one": (Router(1), 1, False),
    "sigmoid": (Router(4, "sigmoid"), 16, False),
    "bias": (Router(4, "sigmoid", scale=2.5), 16, True),
    "bias-of-softmax": (Router(2), 9, True),
    "groups": (Router(4, num_groups=4, top_groups=2), 24, False),
    "groups-and-bias": (Router(4, "sigmoid", num_groups=8, top_groups=3, scale=2.5), 32, True),
    "odd-groups": (Router(7, "sigmoid", num_groups=5, top_groups=3), 35, True),
    "groups-of-one": (Router(2, num_groups=6, top_groups=4), 6, False),
    "shared": (Router(2, num_shared=2), 10, False),
    "gated": (Router(3, num_shared=1, shared_gate=True, scale=3.0), 16, False),
    "many": (Router(10, num_shared=1, shared_gate=True), 512, False),
}


def draw(router: Router, num_experts: int, *, has_bias: bool, path: Path) -> tuple[Tensor, Tensor | None]:
    """Return logits, which lie apart with NaN between, and a bias that changes who is chosen."""
    generator = torch.Generator().manual_seed(num_experts)
    columns = num_experts + router.shared_gate
    logits = torch.randn(13, columns + 3, generator=generator) * 2
    logits[:, columns:] = torch.nan
    bias = torch.randn(num_experts, generator=generator).to(path.device) if has_bias else None
    return logits.to(path.device, path.dtype)[:, :columns], bias


def check(path: Path, logits: Tensor, router: Router, bias: Tensor | None, starts: Tensor | None = None) -> None:
    weights, experts = path.route(logits, router, bias, starts)
    want_weights, want_experts = route_tokens_reference(logits, router, bias, starts)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_routes_match_the_reference(path: Path, case: str) -> None:
    router, num_experts, has_bias = CASES[case]
    logits, bias = draw(router, num_experts, has_bias=has_bias, path=path)
    check(path, logits, router, bias)


@pytest.mark.parametrize("case", ["softmax", "bias", "groups-and-bias", "gated", "odd-groups"])
def test_of_equal_scores_the_lowest_expert_is_first(path: Path, case: str) -> None:
    router, num_experts, has_bias = CASES[case]
    logits, bias = draw(router, num_experts, has_bias=has_bias, path=path)
    logits[:6] = 0.0
    logits[6:] = logits[6:].round().clamp(-1, 1)
    if bias is not None:
        bias.zero_()
    check(path, logits, router, bias)


@pytest.mark.parametrize("num_live", [0, 1, 9, 13])
def test_tokens_behind_the_rows_have_no_expert(path: Path, num_live: int) -> None:
    router, num_experts, _ = CASES["gated"]
    logits, _ = draw(router, num_experts, has_bias=False, path=path)
    logits[num_live:] = torch.nan
    starts = torch.tensor([0, num_live // 2, num_live], dtype=torch.int32, device=path.device)
    check(path, logits, router, None, starts)
    weights, experts = path.route(logits, router, None, starts)
    assert (experts[num_live:] == -1).all() and (weights[num_live:] == 0).all()


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("case", ["softmax", "groups-and-bias"])
def test_a_token_that_is_not_finite_has_experts_and_spoils_no_other(path: Path, case: str, wrong: float) -> None:
    router, num_experts, has_bias = CASES[case]
    logits, bias = draw(router, num_experts, has_bias=has_bias, path=path)
    want = path.route(logits, router, bias)
    logits[4, 1], logits[7] = wrong, wrong
    weights, experts = path.route(logits, router, bias)
    others = [i for i in range(13) if i not in (4, 7)]
    assert torch.equal(weights[others], want[0][others]) and torch.equal(experts[others], want[1][others])
    # NaN counts as the least score.
    assert torch.equal(experts, route_tokens_reference(logits, router, bias)[1])
    assert ((experts >= 0) & (experts < num_experts)).all()
    assert all(len(set(row)) == router.num_choices for row in experts.tolist())


def test_routes_are_those_of_torch(path: Path) -> None:
    """The softmax of the largest logits, as Mixtral and Qwen have it."""
    logits, _ = draw(Router(4), 32, has_bias=False, path=path)
    weights, experts = path.route(logits, Router(4))
    top = logits.float().topk(4)
    assert (weights.diff(dim=1) <= 0).all()
    torch.testing.assert_close(weights, top.values.softmax(1), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(logits.float().gather(1, experts.long()), top.values)


def test_bias_chooses_and_does_not_weigh(path: Path) -> None:
    router = Router(2, "sigmoid", normalize=False)
    logits, _ = draw(router, 8, has_bias=False, path=path)
    bias = torch.zeros(8, device=path.device)
    bias[5] = 100.0
    weights, experts = path.route(logits, router, bias)
    assert (experts[:, 0] == 5).all()
    torch.testing.assert_close(weights[:, 0], logits[:, 5].float().sigmoid(), rtol=2e-6, atol=1e-7)


def test_sum_of_tiny_scores_is_not_zero(path: Path) -> None:
    logits = torch.full((1, 4), -80.0, device=path.device, dtype=path.dtype)
    check(path, logits, Router(2, "sigmoid"), None)
