"""Random batches for the tests of `rotate_and_store`. What no row owns is NaN: pages, lines, tokens of skipped rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rigs.kernels.paths import InterpretedPath, Path
from torch import Tensor

from deltaline_kernels import Rows, rotate_and_store, rotate_and_store_reference

INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Heads:
    """Sizes; `gate` channels lie behind each head of the queries, as Qwen's projection leaves them. is_latent: a
    token's values and keys lie together."""

    HQ: int = 4
    HKV: int = 2
    D: int = 16
    DV: int = 16
    R: int = 8
    page_size: int = 16
    gate: int = 0
    is_latent: bool = False


@dataclass(frozen=True)
class Row:
    """One row; skipped: "padding" has neither line, "nowhere" reads one, "null" writes line 0."""

    length: int
    position: int = 0
    skipped: str = ""


@dataclass(frozen=True)
class RotaryBatch:
    heads: Heads
    rows: Rows
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    rotary: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    own: Tensor  # bool [pages, page_size]: positions of the rows' own tokens
    eps: float = 1e-6

    @property
    def inputs(self) -> tuple[Tensor | float | Rows | None, ...]:
        weights = (self.q_norm, self.k_norm, self.eps, self.rotary)
        return (self.q, self.k, self.v, *weights, self.k_pages, self.v_pages, self.page_table, self.rows)

    def clone(self) -> RotaryBatch:
        """Return the batch with its own copies of what the operation mutates."""
        return replace(self, k_pages=self.k_pages.clone(), v_pages=self.v_pages.clone())

    def run(self, path: Path) -> Tensor:
        if not isinstance(path, InterpretedPath):
            return rotate_and_store(*self.inputs)  # type: ignore[arg-type]
        from deltaline_kernels.rotary.kernel import rotate_and_store_triton

        out = torch.empty(self.q.shape, dtype=self.q.dtype)
        rotate_and_store_triton(*self.inputs, out)  # type: ignore[arg-type, call-arg]
        return out

    def run_reference(self) -> Tensor:
        return rotate_and_store_reference(*self.inputs)  # type: ignore[arg-type]


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of floating point values, so that NaNs compare too."""
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def make_rotary_batch(
    rows: Sequence[Row],
    path: Path,
    heads: Heads | None = None,
    *,
    seed: int = 0,
    norms: tuple[bool, bool] = (True, True),
    padding: int = 5,
    tokens_of_no_row: int = 2,
) -> RotaryBatch:
    """Make random inputs for `rows` on the path's device, with pages and lines of the rows scattered.

    q, k and v are columns of one tensor, behind which `padding` more lie. Behind the last row are tokens of no row.
    """
    heads = heads or Heads()
    size = heads.page_size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    live = [not row.skipped for row in rows]
    needed = [-(-(row.position + row.length) // size) for row in rows]
    max_pages = max([*needed, 0]) + 1
    num_lines, num_pages = len(rows) + 3, sum(needed) + num_extra_pages(rows)
    lines = (torch.randperm(num_lines - 1, generator=generator) + 1).tolist()
    pages = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    # Lines of no row have pages too: who takes the wrong line writes where nobody may.
    page_table = torch.tensor(pages)[torch.randint(num_pages - 1, (num_lines, max_pages), generator=generator)]
    own = torch.zeros(num_pages, size, dtype=torch.bool)
    writes, reads, start = [], [], 0
    num_tokens = sum(row.length for row in rows) + tokens_of_no_row
    gated, keys = heads.HQ * (heads.D + heads.gate), heads.HKV * heads.D
    wide = normal(num_tokens, gated + keys + heads.HKV * heads.DV + padding)
    for i, row in enumerate(rows):
        taken, pages = pages[: needed[i]], pages[needed[i] :]
        page_table[lines[i]] = 0
        page_table[lines[i], : needed[i]] = torch.tensor(taken, dtype=torch.int64)
        for position in range(row.position, row.position + row.length if live[i] else row.position):
            own[taken[position // size], position % size] = True
        writes.append({"": lines[i], "padding": -1, "nowhere": -1, "null": 0}[row.skipped])
        reads.append(-1 if row.skipped == "padding" else lines[i])
        if not live[i]:
            wide[start : start + row.length] = torch.nan
        start += row.length
    wide[start:] = torch.nan
    lengths, zeros = [row.length for row in rows], [0] * len(rows)
    plan = Rows.build(
        lengths,
        reads,
        writes,
        lengths,
        zeros,
        zeros,
        max_short=4,
        device=path.device,
        position=[row.position for row in rows],
    )
    q, k, v, _ = wide.to(path.device, path.dtype).split((gated, keys, heads.HKV * heads.DV, padding), dim=1)
    angles = torch.outer(torch.arange(max_pages * size), 10_000.0 ** -torch.linspace(0, 1, heads.R // 2))
    q_norm, k_norm = (1 + 0.3 * normal(2, heads.D)).to(path.device)
    nan_pages = torch.full((num_pages, size, heads.HKV, heads.D + heads.DV), torch.nan, dtype=path.dtype)
    v_pages, k_pages = nan_pages.to(path.device).split((heads.DV, heads.D), dim=3)
    if not heads.is_latent:
        k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
    return RotaryBatch(
        heads,
        plan,
        q.unflatten(1, (heads.HQ, -1))[..., : heads.D],
        k.unflatten(1, (heads.HKV, -1)),
        v.unflatten(1, (heads.HKV, -1)),
        q_norm if norms[0] else None,
        k_norm if norms[1] else None,
        torch.cat((angles.cos(), angles.sin()), dim=1).to(path.device),
        k_pages,
        v_pages,
        page_table.int().to(path.device),
        own.to(path.device),
    )


def num_extra_pages(rows: Sequence[Row]) -> int:
    """Pages that no row owns: page 0, and as many as there are rows and two more."""
    return len(rows) + 3
