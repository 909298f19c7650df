"""The inputs of one case of attention and its fp64 truth. Knows no implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaline_bench import batch
from deltaline_bench.attention.shape import Shape


class Batch(batch.Batch[Shape]):
    """The pages of a row are scattered over the pool. Page 0 is nobody's; it and what lies behind keys hold NaN.

    v_pages: None of latents.
    """

    v_pages: Tensor | None

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        size = shape.page_size
        counts = [-(-length // size) for length in shape.lengths]
        order = torch.randperm(sum(counts), generator=self.generator, device=device) + 1
        # Line i + 1 is that of row i.
        self.page_table = torch.zeros(shape.num_rows + 1, max(counts), dtype=torch.int32, device=device)
        pool = (sum(counts) + 1, size, shape.num_keys, shape.dim)
        parts = [
            torch.empty(pool, dtype=shape.dtype, device=device).normal_(generator=self.generator)
            for _ in range(1 if shape.value_dim else 2)
        ]
        self.k_pages, self.v_pages = parts[0], None if shape.value_dim else parts[1]
        begin = 0
        for row, (count, length) in enumerate(zip(counts, shape.lengths, strict=True)):
            self.page_table[row + 1, :count] = order[begin : begin + count]
            for pages in parts:
                pages[order[begin + count - 1], length - (count - 1) * size :] = torch.nan
            begin += count
        for pages in parts:
            pages[0] = torch.nan
        self.q = self.normal(shape.num_tokens, shape.num_queries, shape.dim, dtype=shape.dtype)

    def keys_of(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the keys `[length, HKV, D]` and values `[length, HKV, DV]` of a row."""
        length = self.shape.lengths[row]
        count = -(-length // self.shape.page_size)
        pages = self.page_table[row + 1, :count].long()
        k = self.k_pages[pages].flatten(0, 1)[:length]
        if self.v_pages is None:
            return k, k[..., : self.shape.out_dim]
        return k, self.v_pages[pages].flatten(0, 1)[:length]

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies q `[N, HQ, n, D]`, k `[N, HKV, longest, D]` and v `[.., DV]`; zeros behind shorter rows."""
        shape = self.shape
        q = self.q.view(shape.num_rows, shape.tokens, shape.num_queries, shape.dim).transpose(1, 2).contiguous()
        size = (shape.num_rows, shape.num_keys, max(shape.lengths))
        k, v = (torch.zeros(*size, dim, dtype=shape.dtype, device=self.device) for dim in (shape.dim, shape.out_dim))
        for row, length in enumerate(shape.lengths):
            for target, source in zip((k, v), self.keys_of(row), strict=True):
                target[row, :, :length] = source.transpose(0, 1)
        return q, k, v

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32: o `[N * n, HQ, DV]`."""
        shape = self.shape
        o = torch.empty(*self.q.shape[:2], shape.out_dim, device=self.device)
        scale = shape.dim**-0.5 if shape.scale is None else shape.scale
        for row, length in enumerate(shape.lengths):
            k, v = self.keys_of(row)
            tokens = slice(row * shape.tokens, (row + 1) * shape.tokens)
            position = torch.arange(length - shape.tokens, length, device=self.device)[:, None]
            low = 0 if shape.window is None else max(0, length - shape.tokens - shape.window + 1)
            kv = torch.arange(low, length, device=self.device)
            seen = torch.ones(shape.tokens, length - low, dtype=torch.bool, device=self.device)
            if shape.is_causal:
                seen &= kv <= position
            if shape.window is not None:
                seen &= kv > position - shape.window
            for head in range(shape.num_queries):
                i_kv = head // (shape.num_queries // shape.num_keys)
                s = self.q[tokens, head].double() @ k[low:, i_kv].double().t() * scale
                if shape.soft_cap is not None:
                    s = shape.soft_cap * torch.tanh(s / shape.soft_cap)
                p = torch.where(seen, s, -torch.inf).softmax(-1)
                o[tokens, head] = (p @ v[low:, i_kv].double()).float()
        return {"o": o}
