"""Attention over keys and values in pages (a stand-in that knows the CPU and causal masks alone)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows


class Modifiers:
    """What changes scores and masks of attention."""

    def __init__(
        self, scores: Sequence[str] = (), mask: str | None = None, *, device: torch.device | str = "cpu"
    ) -> None:
        self.mask = mask


def find_modifier(name: str) -> Callable[[], str]:
    """The modifier of this name: "causal", a query sees the keys up to its own position."""
    assert name == "causal"
    return lambda: name


def flex_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    rows: Rows,
    *,
    modifiers: Modifiers | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor:
    """Return `[T, HQ, DV]`: what each query of q `[T, HQ, D]` takes from the keys of its row, times sigmoid(gate)."""
    assert sinks is None and not return_lse and modifiers is not None and modifiers.mask == "causal"
    num_heads, num_kv, value_dim = q.shape[1], k_pages.shape[2], v_pages.shape[3]
    out = torch.zeros(q.shape[0], num_heads, value_dim, dtype=q.dtype, device=q.device)
    page_size, starts = k_pages.shape[1], rows.query_start_loc.tolist()
    for row, (read, line) in enumerate(zip(rows.read_line.tolist(), rows.write_line.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if read < 0 or line < 0 or begin == end:
            continue
        first = int(rows.position[row])
        length = first + end - begin
        pages = page_table[line, : -(-length // page_size)].long()
        keys = k_pages[pages].flatten(0, 1)[:length].float().repeat_interleave(num_heads // num_kv, dim=1)
        values = v_pages[pages].flatten(0, 1)[:length].float().repeat_interleave(num_heads // num_kv, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * (scale or q.shape[-1] ** -0.5)
        at = torch.arange(length, device=q.device)
        scores.masked_fill_(at[None, :] > at[first:, None], float("-inf"))
        o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        out[begin:end] = (o if gate is None else o * torch.sigmoid(gate[begin:end].float())).to(q.dtype)
    return out


flex_decode_reference = flex_decode
