"""The states of a cohort of rows on the CPU: read from their lines, replayed, advanced by the rows' tokens and written.

Shared by the recurrences h = exp(g) h + u k^T, which differ in what k, u and g are and in what they read from h. Knows
lines and records; does not know tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.decay import exp_
from deltaline_kernels.cpu.row_groups import Cohort, is_run, put, take


def advance_cohort(
    cohort: Cohort,
    state: Tensor,
    drafts: Tensor,
    o: Tensor,
    num_key_heads: int,
    compute: Callable[[Tensor, Tensor], Tensor | None],
) -> None:
    """Run a cohort; mutates `state` `[L, HV, V, K]`, `drafts` `[L, 2, M, record]` and o `[T, HV, V]`.

    Args:
        compute: given the states h `[B, HV, V, K]` fp32 and out `[B, n, HV, V]` fp32, n at least 1: writes the outputs
            to out, advances h in place if the rows commit, and returns the records `[B, n, record]` of rows that don't
            and write, else None.
    """
    n, c, r = cohort.length, cohort.committed, cohort.replayed
    mutates = r > 0 or c > 0
    shared = state.dtype == torch.float32 and (cohort.in_place or not mutates)
    h = _load_state(state, cohort, shared)  # (B, HV, V, K) fp32
    if r > 0:
        index = _half_index(cohort.read_lines, cohort.halves)
        _fold_records(h, drafts.flatten(0, 1)[index, :r], num_key_heads)
        moved = not shared
    else:
        moved = cohort.read_lines != cohort.write_lines
    if c == 0 and cohort.writes and moved:
        put(state, cohort.write_lines, h)
    if n > 0:
        in_place = cohort.packed and o.dtype == torch.float32
        out = cohort.tokens(o) if in_place else torch.empty((cohort.num_rows, n, *o.shape[1:]), dtype=torch.float32)
        records = compute(h, out)
        if records is not None:
            index = _half_index(cohort.write_lines, [1 - half for half in cohort.halves])
            drafts.flatten(0, 1)[index, :n] = records
        if not in_place:
            cohort.put_tokens(o, out)
    if c > 0 and cohort.writes and not shared:
        put(state, cohort.write_lines, h)


def _half_index(lines: list[int], halves: list[int]) -> Tensor:
    """Return where in drafts `[2*L, M, record]` those halves of the lines are."""
    return torch.tensor([2 * line + half for line, half in zip(lines, halves, strict=True)])


def _load_state(state: Tensor, cohort: Cohort, shared: bool) -> Tensor:
    """Return the rows' states in fp32; a view of `state` only where that is `shared` and they follow each other."""
    if not cohort.reads:
        return torch.zeros((cohort.num_rows, *state.shape[1:]), dtype=torch.float32)
    taken = take(state, cohort.read_lines)
    if shared or taken.dtype != torch.float32:
        return taken.float()
    return taken.clone() if is_run(cohort.read_lines) else taken


def _fold_records(h: Tensor, records: Tensor, num_key_heads: int) -> None:
    """Fold the records into h `[B, HV, V, K]`, in place: all at once, since their updates are known.

    Args:
        records: `[B, r, H*K + HV*V + HV]` fp32, k, u and g of each token; value head i uses key head i // (HV / H).
    """
    num_value_heads, value_dim, key_dim = h.shape[1:]
    sizes = (num_key_heads * key_dim, num_value_heads * value_dim, num_value_heads)
    k, u, g = records.split(sizes, dim=-1)
    k = k.unflatten(-1, (num_key_heads, key_dim)).transpose(1, 2)
    k = k.repeat_interleave(num_value_heads // num_key_heads, dim=1).flatten(0, 1)  # (B*HV, r, K)
    u = u.unflatten(-1, (num_value_heads, value_dim)).transpose(1, 2).flatten(0, 1)  # (B*HV, r, V)
    # What is left of each token and, behind the last one, of the state: sums of the gates from there on.
    left = F.pad(g.transpose(1, 2).flatten(0, 1), (0, 1)).flip(1).cumsum(1).flip(1)  # (B*HV, r+1)
    left = exp_(left)[..., None]
    h.flatten(0, 1).mul_(left[:, :1]).baddbmm_((u * left[:, 1:]).transpose(1, 2), k)
