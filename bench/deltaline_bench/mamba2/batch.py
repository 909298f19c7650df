"""The inputs of one case of the Mamba2 recurrence and its fp64 truth. Knows no implementation."""

from __future__ import annotations

import math
import zlib
from operator import itemgetter

import torch
from torch import Tensor

from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.mamba2.truth import Tokens, advance, read_tokens

# Bounds of softplus(dt_bias), uniform in the logarithm, as layers are made.
STEP = (1e-3, 1e-1)


class Batch:
    """Random inputs of a shape, the same for a seed; states lie in lines scattered over a pool.

    The lines that no row may read hold NaN. Nothing here is mutated by a side: `new_state` and `new_drafts` copy.

    Args:
        seed_name: what the random numbers depend on, beside the shape.
    """

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        # Its own generator: a capture that fails may leave the default one unusable.
        self._generator = torch.Generator(device).manual_seed(zlib.crc32(seed_name.encode()))
        heads = shape.num_heads
        self.A_log = self._uniform(heads).mul(15).add(1).log()
        low, high = (math.log(bound) for bound in STEP)
        self.dt_bias = self._uniform(heads).mul(high - low).add(low).exp().expm1().log()
        self.D = self._normal(heads)
        self.xBC, self.dt = self._draw(shape.num_tokens)
        # Line 0 is the null line of every side; some lines belong to nobody.
        self.num_lines = 2 + shape.num_rows + shape.num_rows // 4
        order = torch.randperm(self.num_lines - 1, generator=self._generator, device=device) + 1
        self.line_index = order[: shape.num_rows]
        fresh = [shape.is_fresh(row) for row in range(shape.num_rows)]
        self.continues = ~torch.tensor(fresh, device=device)
        # What each row starts from; zero for a fresh one.
        size = (shape.num_rows, heads, shape.head_dim, shape.state_dim)
        self.states = self._normal(*size).mul_(self.continues[:, None, None, None]).to(shape.state)
        self.accepted = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.half = torch.arange(shape.num_rows, device=device) % 2
        if shape.mode is Mode.VERIFY:
            self.accepted.random_(1, shape.max_drafts + 1, generator=self._generator)
            # [N, M, ...]; the kernels keep drafts in fp32.
            self.drafts = self._by_row(self._read(*self._draw(shape.num_tokens)))

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device)

    def _uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self._generator, device=self.device)

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw xBC and the raw time steps."""
        shape = self.shape
        xBC, dt = self._normal(count, shape.channels), self._normal(count, shape.num_heads) * 0.5
        return xBC.to(shape.dtype), dt.to(shape.dtype)

    def _read(self, xBC: Tensor, dt: Tensor) -> Tokens:
        return read_tokens(self.shape, xBC, dt, self.A_log, self.D, self.dt_bias)

    def _by_row(self, tokens: Tokens) -> Tokens:
        """View packed tokens of rows of one length as `[N, length, ...]`."""
        return tokens.map(lambda x: x.unflatten(0, (self.shape.num_rows, -1)))

    @property
    def num_replayed(self) -> int:
        """Accepted drafts of all rows."""
        return int(self.accepted.sum())

    def starts(self) -> list[int]:
        """Return the first packed token of each row, and the end of the last one."""
        found = [0]
        for length in self.shape.lengths:
            found.append(found[-1] + length)
        return found

    def int32(self, values: Tensor | list[int]) -> Tensor:
        """Return `values` as int32 on the batch's device."""
        return torch.as_tensor(values).to(device=self.device, dtype=torch.int32)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of x `[T, H, P]`, B and C `[T, G, S]`."""
        shape = self.shape
        x, B, C = self.xBC.split((shape.values, shape.keys, shape.keys), dim=1)
        B, C = (part.unflatten(1, (shape.num_groups, shape.state_dim)) for part in (B, C))
        return x.unflatten(1, (shape.num_heads, shape.head_dim)), B, C

    def new_state(self) -> Tensor:
        """Return a pool `[L, H, P, S]`: the lines of rows that continue, NaN elsewhere."""
        shape = self.shape
        size = (self.num_lines, shape.num_heads, shape.head_dim, shape.state_dim)
        state = torch.full(size, torch.nan, dtype=shape.state, device=self.device)
        self.reset_state(state)
        return state

    def reset_state(self, state: Tensor) -> None:
        """Put back what `new_state` returned in the lines of rows; a fresh row's line holds NaN."""
        state[self.line_index] = self.states
        state[self.line_index[~self.continues]] = torch.nan

    def new_drafts(self) -> Tensor:
        """Return `[L, 2, M, G*S + H*P + H]` fp32: the drafts of rows in their halves, NaN elsewhere."""
        size = (self.num_lines, 2, self.shape.max_drafts, self.shape.record)
        drafts = torch.full(size, torch.nan, device=self.device)
        self.reset_drafts(drafts)
        return drafts

    def reset_drafts(self, drafts: Tensor) -> None:
        """Put back what `new_drafts` returned."""
        if self.shape.mode is Mode.VERIFY:
            drafts[self.line_index, self.half] = self.drafts.records().float()

    def started(self) -> Tensor:
        """Return each row's fp64 state before its tokens: the accepted drafts are folded in."""
        states = self.states.double()
        if self.shape.mode is not Mode.VERIFY:
            return states
        # A draft that was not accepted neither decays the state nor writes into it.
        is_accepted = torch.arange(self.shape.max_drafts, device=self.device) < self.accepted[:, None]
        kept = self.drafts.map(lambda x: x.float().double())
        u, g = kept.u * is_accepted[..., None, None], kept.g * is_accepted[..., None]
        return advance(Tokens(kept.B, kept.C, u, kept.skip, g), states)[1]

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32.

        y: `[T, H, P]`. state: `[N, H, P, S]`, each row's line after the step. VERIFY also, drafts: `[N, n, ...]`, what
        the rows keep; token_states: `[N, n, H, P, S]`, the state after each token, which some peers keep.
        """
        shape = self.shape
        tokens, states = self._read(self.xBC, self.dt), self.started()
        if shape.mode is Mode.VERIFY:
            return self._expected_verify(self._by_row(tokens), states)
        y = torch.empty(shape.num_tokens, shape.num_heads, shape.head_dim, device=self.device)
        after = torch.empty(states.shape, device=self.device)
        starts = self.starts()
        # Row by row where rows are long: the fp64 tokens of all at once would take gigabytes.
        for row, length in enumerate(shape.lengths):
            if shape.mode is Mode.DECODE:
                break
            own = tokens.map(itemgetter((None, slice(starts[row], starts[row] + length))))
            after[row] = states[row]
            if length > 0:
                found, state = advance(own, states[row : row + 1])
                y[starts[row] : starts[row] + length] = found[0].float()
                after[row] = state[0].float()
        if shape.mode is Mode.DECODE:
            found, state = advance(self._by_row(tokens), states)
            y.copy_(found[:, 0])
            after.copy_(state)
        return {"y": y, "state": after}

    def _expected_verify(self, tokens: Tokens, states: Tensor) -> dict[str, Tensor]:
        kept = {"state": states.float(), "drafts": tokens.records().float()}
        outputs, token_states = [], []
        for i in range(self.shape.max_drafts):
            y, states = advance(tokens.map(itemgetter((slice(None), slice(i, i + 1)))), states)
            outputs.append(y.float())
            token_states.append(states.float())
        return kept | {"y": torch.cat(outputs, dim=1).flatten(0, 1), "token_states": torch.stack(token_states, dim=1)}
