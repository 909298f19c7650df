"""The inputs of one case of the gated delta rule and its fp64 truth. Knows no implementation."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from deltaline_bench.gated_delta.shape import Mode, Shape
from deltaline_bench.gated_delta.truth import Tokens, advance, read_tokens


@dataclass(frozen=True)
class Inputs:
    """How the tokens are distributed.

    Args:
        alike: part of each key that all keys of its head share; 0 for independent ones.
        step: bounds of softplus(dt_bias), uniform in the logarithm; exp(g) is near 1 for small ones, near 0 for large.
        write: mean of b; sigmoid(4) is 0.98.
    """

    alike: float = 0.0
    step: tuple[float, float] = (1e-3, 1e-1)
    write: float = 0.0


class Batch:
    """Random inputs of a shape, the same for a seed; states lie in lines scattered over a pool.

    The lines that no row may read hold NaN. Nothing here is mutated by a side: `new_state` and `new_drafts` copy.

    Args:
        seed_name: what the random numbers depend on, beside the shape.
    """

    def __init__(self, shape: Shape, seed_name: str, device: torch.device, inputs: Inputs) -> None:
        self.shape = shape
        self.device = device
        # Its own generator: a capture that fails may leave the default one unusable.
        self._generator = torch.Generator(device).manual_seed(zlib.crc32(seed_name.encode()))
        heads = shape.num_value_heads
        self.A_log = self.uniform(heads).mul(15).add(1).log()
        low, high = (math.log(bound) for bound in inputs.step)
        self.dt_bias = self.uniform(heads).mul(high - low).add(low).exp().expm1().log()
        self.qkv, self.a, self.b = self._tokens(shape.num_tokens, inputs)
        # Line 0 is the null line of every side; some lines belong to nobody.
        self.num_lines = 2 + shape.num_rows + shape.num_rows // 4
        order = torch.randperm(self.num_lines - 1, generator=self._generator, device=device) + 1
        self.line_index = order[: shape.num_rows]
        fresh = [shape.is_fresh(row) for row in range(shape.num_rows)]
        self.continues = ~torch.tensor(fresh, device=device)
        # What each row starts from; zero for a fresh one.
        size = (shape.num_rows, heads, shape.value_dim, shape.key_dim)
        self.states = self.normal(*size).mul_(self.continues[:, None, None, None]).to(shape.state)
        self.accepted = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.half = torch.arange(shape.num_rows, device=device) % 2
        if shape.mode is Mode.VERIFY:
            drafts = self._tokens(shape.num_tokens, inputs)
            self.accepted.random_(1, shape.max_drafts + 1, generator=self._generator)
            # [N, M, ...]; the kernels keep drafts in fp32.
            self.drafts = self._by_row(read_tokens(shape, *drafts, self.A_log, self.dt_bias))

    def normal(self, *size: int) -> Tensor:
        """Draw fp32 numbers."""
        return torch.randn(size, generator=self._generator, device=self.device)

    def uniform(self, *size: int) -> Tensor:
        """Draw fp32 numbers of 0..1."""
        return torch.rand(size, generator=self._generator, device=self.device)

    def _tokens(self, count: int, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Draw qkv and the raw gates a and b."""
        shape = self.shape
        qkv = self.normal(count, shape.channels)
        keys = qkv[:, shape.keys : 2 * shape.keys]
        keys.mul_(math.sqrt(1 - inputs.alike**2)).add_(self.normal(1, shape.keys), alpha=inputs.alike)
        a = self.normal(count, shape.num_value_heads) * 0.5
        b = self.normal(count, shape.num_value_heads) + inputs.write
        return qkv.to(shape.dtype), a.to(shape.dtype), b.to(shape.dtype)

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
        """Return views of q and k `[T, H, K]` and v `[T, HV, V]`."""
        shape = self.shape
        q, k, v = self.qkv.split((shape.keys, shape.keys, shape.values), dim=1)
        q, k = (x.unflatten(1, (shape.num_key_heads, shape.key_dim)) for x in (q, k))
        return q, k, v.unflatten(1, (shape.num_value_heads, shape.value_dim))

    def gates(self) -> tuple[Tensor, Tensor]:
        """Return g (log space) and beta, fp32 `[T, HV]`."""
        tokens = self.tokens()
        return tokens.g.float(), tokens.beta.float()

    def tokens(self) -> Tokens:
        """Return the packed tokens in fp64."""
        return read_tokens(self.shape, self.qkv, self.a, self.b, self.A_log, self.dt_bias)

    def new_state(self) -> Tensor:
        """Return a pool `[L, HV, V, K]`: the lines of rows that continue, NaN elsewhere."""
        shape = self.shape
        size = (self.num_lines, shape.num_value_heads, shape.value_dim, shape.key_dim)
        state = torch.full(size, torch.nan, dtype=shape.state, device=self.device)
        self.reset_state(state)
        return state

    def reset_state(self, state: Tensor) -> None:
        """Put back what `new_state` returned in the lines of rows; a fresh row's line holds NaN."""
        state[self.line_index] = self.states
        state[self.line_index[~self.continues]] = torch.nan

    def new_drafts(self) -> Tensor:
        """Return `[L, 2, M, H*K + HV*V + HV]` fp32: the drafts of rows in their halves, NaN elsewhere."""
        size = (self.num_lines, 2, self.shape.max_drafts, self.shape.record)
        drafts = torch.full(size, torch.nan, device=self.device)
        self.reset_drafts(drafts)
        return drafts

    def reset_drafts(self, drafts: Tensor) -> None:
        """Put back what `new_drafts` returned."""
        if self.shape.mode is Mode.VERIFY:
            drafts[self.line_index, self.half] = self.drafts.records(self.states.double()).float()

    def started(self) -> Tensor:
        """Return each row's fp64 state before its tokens: the accepted drafts are folded in."""
        states = self.states.double()
        if self.shape.mode is not Mode.VERIFY:
            return states
        # A draft that was not accepted neither decays the state nor writes into it.
        is_accepted = torch.arange(self.shape.max_drafts, device=self.device) < self.accepted[:, None]
        kept = self.drafts.map(lambda x: x.float().double())
        kept = Tokens(kept.q, kept.k, kept.v, kept.g * is_accepted[..., None], kept.beta * is_accepted[..., None])
        return advance(kept, states)[1]

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32.

        o: `[T, HV, V]`. state: `[N, HV, V, K]`, each row's line after the step. VERIFY also, drafts: `[N, n, ...]`,
        what the rows keep; token_states: `[N, n, HV, V, K]`, the state after each token, which some peers keep.
        """
        shape = self.shape
        tokens, states = self.tokens(), self.started()
        if shape.mode is Mode.VERIFY:
            return self._expected_verify(self._by_row(tokens), states)
        o = torch.empty(shape.num_tokens, shape.num_value_heads, shape.value_dim, device=self.device)
        after = torch.empty(states.shape, device=self.device)
        starts = self.starts()
        for length in sorted(set(shape.lengths)):
            rows = [row for row, other in enumerate(shape.lengths) if other == length]
            if length == 0:
                after[rows] = states[rows].float()
                continue
            index = torch.tensor(
                [range(starts[row], starts[row] + length) for row in rows], dtype=torch.int64, device=self.device
            )
            found, state = advance(tokens.map(itemgetter(index)), states[rows])
            o[index] = found.float()
            after[rows] = state.float()
        return {"o": o, "state": after}

    def _expected_verify(self, tokens: Tokens, states: Tensor) -> dict[str, Tensor]:
        kept = {"state": states.float(), "drafts": tokens.records(states).float()}
        outputs, token_states = [], []
        for i in range(self.shape.max_drafts):
            o, states = advance(tokens.map(itemgetter((slice(None), slice(i, i + 1)))), states)
            outputs.append(o.float())
            token_states.append(states.float())
        return kept | {"o": torch.cat(outputs, dim=1).flatten(0, 1), "token_states": torch.stack(token_states, dim=1)}
