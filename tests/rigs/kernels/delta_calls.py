"""Calls of the engines' gated delta rule: their tensors, packed and not, and the reference's view of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rigs.kernels.draws import normal
from rigs.kernels.field_gated_delta import Tokens
from rigs.kernels.paths import Path
from torch import Tensor

NUM_SLOTS = 9


@dataclass(frozen=True)
class Case:
    """Rows of a call. `dense`: they are of one length and come as a batch; `packed`: q, k, v are columns of one tensor.

    `slots`: of the rows, or a table; None: row i has state i. `fresh`: there are no states to begin with.
    """

    lengths: Sequence[int]
    slots: Any = None
    accepted: Sequence[int] | None = None
    fresh: bool = False
    dense: bool = False
    packed: bool = True
    l2norm: bool = True
    scale: float | None = None
    heads: tuple[int, int, int, int] = (1, 2, 16, 8)
    gates: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    softplus: tuple[float, float] = (1.0, 20.0)
    more: int = 0

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


@dataclass(frozen=True)
class Call:
    """The tensors of a call on the host, packed; the reference's view of them, and keywords of the function."""

    case: Case
    tokens: Tokens
    wide: Tensor
    device: str

    def arguments(self, **gates: Tensor) -> dict[str, Any]:
        """Return q, k, v, the gates and the keywords that all functions have, on the device."""
        case = self.case
        H, HV, K, V = case.heads
        batch = (len(case.lengths), case.lengths[0]) if case.dense else (1, case.starts[-1])
        wide = self.wide.to(self.device)[:, : 2 * H * K + HV * V]
        parts = wide.split((H * K, H * K, HV * V), dim=1)
        q, k, v = (
            x.unflatten(1, size).unflatten(0, batch) for x, size in zip(parts, [(H, K)] * 2 + [(HV, V)], strict=True)
        )
        if not case.packed:
            # Three distances between tokens.
            room = torch.nn.functional.pad(k.flatten(2), (0, 8))
            q, k, v = q.contiguous(), room[..., : H * K].unflatten(2, (H, K)), v.contiguous()
        told = {"q": q, "k": k, "v": v, "scale": case.scale, "use_qk_l2norm_in_kernel": case.l2norm}
        told |= {name: gate.to(self.device).unflatten(0, batch) for name, gate in gates.items()}
        if not case.dense:
            told["cu_seqlens"] = torch.tensor(case.starts, dtype=case.index, device=self.device)
        return told

    def indices(self) -> Tensor:
        """Return the slots, and behind them `more` rows that must not be read."""
        slots = torch.tensor(self.case.slots, dtype=self.case.index)
        return torch.cat((slots, torch.full((self.case.more, *slots.shape[1:]), 10**6).to(slots))).to(self.device)

    def counts(self) -> Tensor | None:
        accepted = self.case.accepted
        return None if accepted is None else torch.tensor([*accepted, *[7] * self.case.more]).to(self.device)


def make_call(case: Case, path: Path) -> Call:
    """Make random tokens for the case; those of skipped rows are NaN."""
    H, HV, K, V = case.heads
    num_tokens, keys = case.starts[-1], H * K
    wide = normal(num_tokens, 2 * keys + HV * V + 3)
    if not case.l2norm:
        # Keys of length 0.7: not those of a norm, and longer than 1 they would make states grow from token to token.
        heads = wide[:, keys : 2 * keys].unflatten(1, (H, K))
        wide[:, keys : 2 * keys] = 0.7 * torch.nn.functional.normalize(heads, dim=-1).flatten(1)
    wide = wide.to(path.dtype)
    for i, slots in enumerate(case.slots or ()):
        if slots == -1 or (isinstance(slots, list) and min(slots) == -1 == max(slots)):
            wide[case.starts[i] : case.starts[i + 1]] = torch.nan
    q, k, v, _ = wide.split((keys, keys, HV * V, 3), dim=1)
    g = -normal(num_tokens, HV, seed=1).abs().to(case.gates)
    beta = (2 * normal(num_tokens, HV, seed=2).sigmoid()).to(case.gates)
    split = (q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)))
    return Call(case, Tokens(*split, g, beta, case.scale, case.l2norm), wide, path.device)


def make_states(case: Case, used: Sequence[int]) -> Tensor:
    """Return states of slots that are NaN but where they are used."""
    _, HV, K, V = case.heads
    states = torch.full((NUM_SLOTS, HV, V, K), torch.nan)
    for slot in used:
        states[slot] = normal(HV, V, K, seed=10 + slot)
    return states.to(case.states)


def good_chunk(path: Path, case: Case) -> dict[str, Any]:
    call = make_call(case, path)
    states = make_states(case, range(len(case.lengths)))[: len(case.lengths)].to(path.device)
    return call.arguments(g=call.tokens.g, beta=call.tokens.beta) | {"initial_state": states}


def good_rows(path: Path, case: Case) -> dict[str, Any]:
    """Return arguments of `fused_recurrent_gated_delta_rule` with a pool all of whose slots are in use."""
    call = make_call(case, path)
    told = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    told |= {"initial_state": make_states(case, range(NUM_SLOTS)).to(path.device), "ssm_state_indices": call.indices()}
    return told if case.accepted is None else told | {"num_accepted_tokens": call.counts()}


def good_update(path: Path, case: Case) -> dict[str, Any]:
    """Return arguments of `fused_sigmoid_gating_delta_rule_update` with a pool all of whose slots are in use."""
    call, HV = make_call(case, path), case.heads[1]
    a, b = normal(2, case.starts[-1], HV, seed=5).to(path.dtype)
    told = call.arguments(a=a, b=b) | {"A_log": normal(HV).to(path.device), "dt_bias": normal(HV).to(path.device)}
    told |= {"initial_state_source": make_states(case, range(NUM_SLOTS)).to(path.device)}
    return told | {"softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_indices": call.indices()}


def table(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)
