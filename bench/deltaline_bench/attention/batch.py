"""The inputs of one case of attention and its fp64 truth. Knows no implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaline_bench import batch
from deltaline_bench.attention.shape import Shape


class Batch(batch.Batch[Shape]):
    """The pages of a row are scattered over the pool. Page 0 is nobody's; it and what lies behind keys hold NaN."""

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        size = shape.page_size
        counts = [-(-length // size) for length in shape.lengths]
        order = torch.randperm(sum(counts), generator=self.generator, device=device) + 1
        # Line i + 1 is that of row i.
        self.page_table = torch.zeros(shape.num_rows + 1, max(counts), dtype=torch.int32, device=device)
        pool = (sum(counts) + 1, size, shape.num_keys, shape.dim)
        self.k_pages, self.v_pages = (
            torch.empty(pool, dtype=shape.dtype, device=device).normal_(generator=self.generator) for _ in range(2)
        )
        begin = 0
        for row, (count, length) in enumerate(zip(counts, shape.lengths, strict=True)):
            self.page_table[row + 1, :count] = order[begin : begin + count]
            for pages in (self.k_pages, self.v_pages):
                pages[order[begin + count - 1], length - (count - 1) * size :] = torch.nan
            begin += count
        for pages in (self.k_pages, self.v_pages):
            pages[0] = torch.nan
        self.q = self.normal(shape.num_tokens, shape.num_queries, shape.dim, dtype=shape.dtype)

    def keys_of(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a row, `[length, HKV, D]` each."""
        length = self.shape.lengths[row]
        count = -(-length // self.shape.page_size)
        pages = self.page_table[row + 1, :count].long()
        return self.k_pages[pages].flatten(0, 1)[:length], self.v_pages[pages].flatten(0, 1)[:length]

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies q `[N, HQ, n, D]`, k and v `[N, HKV, longest, D]`; zeros behind shorter rows."""
        shape = self.shape
        q = self.q.view(shape.num_rows, shape.tokens, shape.num_queries, shape.dim).transpose(1, 2).contiguous()
        size = (shape.num_rows, shape.num_keys, max(shape.lengths), shape.dim)
        k, v = (torch.zeros(size, dtype=shape.dtype, device=self.device) for _ in range(2))
        for row, length in enumerate(shape.lengths):
            for target, source in zip((k, v), self.keys_of(row), strict=True):
                target[row, :, :length] = source.transpose(0, 1)
        return q, k, v

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32: o `[N * n, HQ, D]`."""
        shape = self.shape
        o = torch.empty(self.q.shape, device=self.device)
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
                s = self.q[tokens, head].double() @ k[low:, i_kv].double().t() * shape.dim**-0.5
                if shape.soft_cap is not None:
                    s = shape.soft_cap * torch.tanh(s / shape.soft_cap)
                p = torch.where(seen, s, -torch.inf).softmax(-1)
                o[tokens, head] = (p @ v[low:, i_kv].double()).float()
        return {"o": o}
