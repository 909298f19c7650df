"""The states of a group of rows on the CPU: read from their lines, replayed, advanced by the rows' tokens and written.

Shared by the recurrences, which differ in how a token advances a state and in what they read from it.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.decay import exp_
from deltaline_kernels.cpu.row_groups import RowGroup, group_rows, put, take
from deltaline_kernels.rows import Rows, StateLines

# Given a group of rows, their states h `[B, *]` fp32 and out `[B, n, *]` fp32, n at least 1: writes the
# outputs to out, advances h in place if the rows commit, and returns the records `[B, n, record]` of rows that don't
# and write, else None.
RunTokens = Callable[[RowGroup, Tensor, Tensor], Tensor | None]
# Given such states and the records `[B, r, record]` of accepted drafts, r at least 1: folds these into h in place.
Fold = Callable[[Tensor, Tensor], None]


def run_rows(rows: Rows, lines: StateLines, o: Tensor, fold: Fold, run_tokens: RunTokens) -> None:
    """Run all rows; mutates `lines` and o `[T, *]`."""
    state, drafts = lines.state, lines.drafts
    apart = lines.written is not None
    written = state if lines.written is None else lines.written
    groups, skipped = group_rows(rows, lines.shift)
    for begin, end in skipped:
        o[begin:end] = 0
    for group in groups:
        mutates = group.replayed > 0 or group.committed > 0
        shared = state.dtype == torch.float32 and state.is_contiguous()
        # States that only move are a copy too: torch does not write a tensor to scattered lines from a view of it.
        shared = shared and ((group.in_place and not apart) or not (mutates or (group.moves and not apart)))
        h = _load_state(state, group, shared)  # (B, *) fp32
        moved = apart or group.moves
        if group.replayed > 0:
            fold(h, drafts[*group.replayed_halves, : group.replayed])
            moved = not shared
        if group.committed == 0 and group.writes and moved:
            put(written, group.write_index, h)
        if group.length > 0:
            out, is_part = group.empty_output(o)
            if group.token_lines:
                _run_kept_tokens(group, h, out, written, run_tokens)
            elif group.waypoints:
                _run_to_waypoints(group, h, out, written, run_tokens)
            else:
                records = run_tokens(group, h, out)
                if records is not None:
                    drafts[*group.written_halves, : group.length] = records
            if not is_part:
                put(o, group.token_index, out.flatten(0, 1))
        if group.committed > 0 and group.writes and not shared:
            put(written, group.write_index, h)


def _run_kept_tokens(group: RowGroup, h: Tensor, out: Tensor, written: Tensor, run_tokens: RunTokens) -> None:
    """Run the rows' tokens one by one, in fp32, and put the state after each into its line; advances h in place."""
    for t in range(group.length):
        one = torch.empty_like(out[:, :1], memory_format=torch.contiguous_format)
        run_tokens(group.token(t), h, one)
        out[:, t : t + 1] = one
        kept, lines = group.lines_of(t)
        put(written, lines, take(h, kept))


def _run_to_waypoints(group: RowGroup, h: Tensor, out: Tensor, written: Tensor, run_tokens: RunTokens) -> None:
    """Run the rows' tokens from waypoint to waypoint, and put the state at each into its line; advances h in place."""
    for begin, end in pairwise(sorted({0, *group.waypoints, group.length})):
        run_tokens(group.part(begin, end), h, out[:, begin:end])
        kept, lines = group.lines_at(end)
        put(written, lines, take(h, kept))


def _load_state(state: Tensor, group: RowGroup, shared: bool) -> Tensor:
    """Return the rows' states in fp32, contiguous; a view of `state` if it is `shared` and they are a slice of it."""
    if not group.reads:
        return torch.zeros((group.num_rows, *state.shape[1:]), dtype=torch.float32)
    taken = take(state, group.read_index)
    if shared or not isinstance(group.read_index, slice):
        return taken.float()
    return taken.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def fold_records(num_key_heads: int, h: Tensor, records: Tensor) -> None:
    """Fold records of h = exp(g) h + u k^T into h `[B, HV, V, K]`, in place: all at once, as their updates are known.

    Args:
        records: `[B, r, H*K + HV*V + HV]` fp32, k, u and g of each token; value head i uses key head i // (HV / H).
            Or `[B, r, H*K + HV*V + HV*K]`, with a g of each key channel.
    """
    num_value_heads, value_dim, key_dim = h.shape[1:]
    keys, values = num_key_heads * key_dim, num_value_heads * value_dim
    k, u, g = records.tensor_split((keys, keys + values), dim=-1)
    k = k.unflatten(-1, (num_key_heads, key_dim)).transpose(1, 2)
    k = k.repeat_interleave(num_value_heads // num_key_heads, dim=1).flatten(0, 1)  # (B*HV, r, K)
    u = u.unflatten(-1, (num_value_heads, value_dim)).transpose(1, 2).flatten(0, 1)  # (B*HV, r, V)
    # What is left of each token and, behind the last one, of the state: sums of the gates from there on.
    g = g.unflatten(-1, (num_value_heads, -1)).transpose(1, 2).flatten(0, 1)  # (B*HV, r, 1 or K)
    left = exp_(F.pad(g, (0, 0, 0, 1)).flip(1).cumsum(1).flip(1))  # (B*HV, r+1, 1 or K)
    h.flatten(0, 1).mul_(left[:, :1]).baddbmm_(u.transpose(1, 2), k * left[:, 1:])
