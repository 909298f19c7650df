"""Routing and experts on the CPU: tiles of tokens of one expert, each a product of matrices of one shape in fp32."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaline_kernels.device.sizes import cdiv, pow2
from deltaline_kernels.moe import plan
from deltaline_kernels.moe.router import Router
from deltaline_kernels.moe.weight import ExpertWeights

# As in the reference.
LEAST_CHOICE = -1e38
MAX_ROWS = 16
# Values of fp32 in a cache line.
LINE_VALUES = 16


def route_cpu(
    logits: Tensor,
    router: Router,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    weights: Tensor,
    experts: Tensor,
) -> None:
    """Write weights and experts `[T, C]`."""
    num_experts = logits.shape[1] - router.shared_gate
    rows = logits[:, :num_experts].float()
    scores = rows.softmax(1) if router.scoring == "softmax" else rows.sigmoid()
    choices = scores if bias is None else scores + bias
    choices = choices.nan_to_num(LEAST_CHOICE).clamp(min=LEAST_CHOICE)
    if router.top_groups < router.num_groups:
        groups = choices.unflatten(1, (router.num_groups, -1))
        best = groups.amax(2) if bias is None else groups.topk(2, dim=2).values.sum(2)
        kept = torch.zeros(best.shape, dtype=torch.bool).scatter_(1, _largest(best, router.top_groups), True)
        choices = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    chosen = _largest(choices, router.top_k)
    own = scores.gather(1, chosen)
    if router.normalize:
        own = own / (own.sum(1, keepdim=True) + 1e-20)
    weights[:, : router.top_k] = own * router.scale
    experts[:, : router.top_k] = chosen
    if router.num_shared > 0:
        weights[:, router.top_k :] = logits[:, num_experts:].float().sigmoid() if router.shared_gate else 1.0
        experts[:, router.top_k :] = torch.arange(num_experts, num_experts + router.num_shared, dtype=torch.int32)
    if query_start_loc is not None:
        num_live = int(query_start_loc[-1])
        if num_live < len(weights):
            weights[num_live:] = 0.0
            experts[num_live:] = -1


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the places of the largest values of each row, the lowest place first among equal ones."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def run_experts_cpu(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    *,
    gated: bool,
    limit: float,
) -> None:
    """Write out `[T, H]`; gated: with silu, else with relu2. limit: as `run_experts` has it."""
    rows = min(MAX_ROWS, pow2(len(x)))
    for begin in range(0, len(x), plan.MAX_TOKENS):
        some = slice(begin, begin + plan.MAX_TOKENS)
        _run_tiles(x[some], gate_up, down, weights[some], experts[some], out[some], rows, gated=gated, limit=limit)


def _run_tiles(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    rows: int,
    *,
    gated: bool,
    limit: float,
) -> None:
    """Write out `[T, H]` in tiles of so many rows.

    A tile is computed whole even where fewer choices are its expert's: so a row's bits don't depend on the others. What
    it leaves in the rows of the next expert, that one's tiles overwrite.
    """
    num_experts, choices = len(gate_up.values), experts.shape[1]
    is_used = (experts >= 0) & (experts < num_experts)
    keys = torch.where(is_used, experts, num_experts).flatten()
    order = keys.argsort(stable=True)
    num_pairs, width = len(order), x.shape[1]
    tokens, parts = _aligned(num_pairs + rows, width), _aligned(num_pairs + rows, width)
    hidden = _aligned(rows, down.values.shape[2])
    tokens[:num_pairs] = x.index_select(0, order // choices)
    end = 0
    for expert, count in enumerate(keys.bincount(minlength=num_experts)[:num_experts].tolist()):
        if count == 0:
            continue
        first, second = gate_up.of(expert).t(), down.of(expert).t()
        begin, end = end, end + count
        for place in range(begin, end, rows):
            inner = torch.mm(tokens[place : place + rows], first)
            if gated:
                gate, up = inner.chunk(2, dim=1)
                if limit:
                    gate.clamp_(max=limit)
                    up.clamp_(-limit, limit)
                torch.mul(silu(gate), up, out=hidden)
            else:
                torch.square(inner.relu_(), out=hidden)
            torch.mm(hidden, second, out=parts[place : place + rows])
    parts[end:] = 0.0
    places = order.argsort().view(experts.shape)
    # Weights of choices without an expert may be anything.
    used_weights = torch.where(is_used, weights, 0.0)[:, :, None]
    total = used_weights[:, 0] * parts.index_select(0, places[:, 0])
    for i in range(1, choices):
        total += used_weights[:, i] * parts.index_select(0, places[:, i])
    out.copy_(total)


def _aligned(rows: int, width: int) -> Tensor:
    """Make room for `[rows, width]` in fp32 whose rows all begin where a cache line does.

    Of few rows a product adds up each in an order that its address decides, and which rows they are others decide.
    """
    return torch.empty(rows, cdiv(width, LINE_VALUES) * LINE_VALUES, dtype=torch.float32)[:, :width]
