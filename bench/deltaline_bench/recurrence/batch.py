"""The inputs of one case of a recurrence and its fp64 truth. Knows no implementation."""

from __future__ import annotations

import math
from abc import abstractmethod
from operator import itemgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from deltaline_bench.lines import LinesBatch, Mode
from deltaline_bench.recurrence.shape import Shape
from deltaline_bench.recurrence.tokens import Tokens

# Bounds of softplus(dt_bias), uniform in the logarithm, as layers are made.
STEP = (1e-3, 1e-1)

S = TypeVar("S", bound=Shape)
T = TypeVar("T", bound=Tokens)


class Batch(LinesBatch[S], Generic[S, T]):
    """Random tokens and states. `new_state` and `new_drafts` make what a side may mutate.

    Args:
        packed: the tokens as they come, their vectors side by side `[T, channels]` before their gates `[T, HV]`.
        states: `[N, HV, V, K]`, what each row starts from; zero for a fresh one.
        half: `[N]`, where the drafts of a row lie.
    """

    def __init__(self, shape: S, seed_name: str, device: torch.device, step: tuple[float, float] = STEP) -> None:
        super().__init__(shape, seed_name, device)
        heads = shape.num_value_heads
        self.A_log = self.uniform(heads).mul(15).add(1).log()
        low, high = (math.log(bound) for bound in step)
        self.dt_bias = self.uniform(heads).mul(high - low).add(low).exp().expm1().log()
        self.draw_weights()
        self.packed = self.draw(shape.num_tokens)
        self.scatter_lines()
        size = (shape.num_rows, heads, shape.value_dim, shape.key_dim)
        self.states = self.normal(*size).mul_(self.continues[:, None, None, None]).to(shape.state)
        self.half = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        if shape.mode is Mode.VERIFY:
            self.half[1::2] = 1
            # [N, M, ...]; the kernels keep drafts in fp32.
            self.drafts = self._by_row(self.read(self.draw_drafts()))

    def draw_weights(self) -> None:
        """Draw the heads' weights beside A_log and dt_bias."""
        return

    @abstractmethod
    def draw(self, count: int) -> tuple[Tensor, ...]:
        """Draw packed tokens."""

    @abstractmethod
    def read(self, packed: tuple[Tensor, ...]) -> T:
        """Unpack tokens, in fp64."""

    def draw_drafts(self) -> tuple[Tensor, ...]:
        """Draw the drafts of a verify and how many of them were accepted."""
        self.accept_drafts()
        return self.draw(self.shape.num_tokens)

    def tokens(self) -> T:
        """Return the packed tokens in fp64."""
        return self.read(self.packed)

    def _by_row(self, tokens: T) -> T:
        """View packed tokens of rows of one length as `[N, length, ...]`."""
        return tokens.map(lambda x: x.unflatten(0, (self.shape.num_rows, -1)))

    @property
    def num_replayed(self) -> int:
        """Accepted drafts of all rows."""
        return int(self.accepted.sum())

    def num_bytes(self) -> int:
        return self.shape.num_bytes(self.num_replayed)

    def num_flops(self) -> int:
        return self.shape.num_flops(self.num_replayed)

    def words(self) -> dict[str, str]:
        return self.shape.words() | {"work": f"{self.num_flops() / 1e9:.1f} GFLOP"}

    def new_state(self) -> Tensor:
        """Return a pool `[L, HV, V, K]`: the lines of rows that continue, NaN elsewhere."""
        size = (self.num_lines, *self.states.shape[1:])
        state = torch.full(size, torch.nan, dtype=self.shape.state, device=self.device)
        self.reset_state(state)
        return state

    def reset_state(self, state: Tensor) -> None:
        """Put back what `new_state` returned in the lines of rows; a fresh row's line holds NaN."""
        state[self.line_index] = self.states
        state[self.line_index[~self.continues]] = torch.nan
        state[self.waypoint_index] = torch.nan

    def new_drafts(self) -> Tensor:
        """Return `[L, 2, M, H*K + HV*V + HV]` fp32: the drafts of rows in their halves, NaN elsewhere."""
        size = (self.num_lines, 2, self.shape.max_drafts, self.shape.record)
        drafts = torch.full(size, torch.nan, device=self.device)
        self.reset_drafts(drafts)
        return drafts

    def reset_drafts(self, drafts: Tensor) -> None:
        """Put back what `new_drafts` returned."""
        if self.shape.mode is Mode.VERIFY:
            drafts[self.line_index, self.half] = self.drafts.walk(self.states.double())["drafts"]

    def started(self) -> Tensor:
        """Return each row's fp64 state before its tokens: the accepted drafts are folded in."""
        states = self.states.double()
        if self.shape.mode is not Mode.VERIFY:
            return states
        is_accepted = torch.arange(self.shape.max_drafts, device=self.device) < self.accepted[:, None]
        return self.drafts.map(lambda x: x.float().double()).only(is_accepted).advance(states)[1]

    def expected(self) -> dict[str, Tensor]:
        """Return the truth in fp32.

        o: `[T, HV, V]`. state: `[N, HV, V, K]`, each row's line after the step. VERIFY also, drafts: `[N, n, ...]`,
        what the rows keep; token_states: `[N, n, HV, V, K]`, the state after each token, which some peers keep.
        With waypoints also, waypoints: `[places, HV, V, K]`.
        """
        shape = self.shape
        tokens, states = self.tokens(), self.started()
        if shape.mode is Mode.VERIFY:
            walked = self._by_row(tokens).walk(states)
            return {**walked, "o": walked["o"].flatten(0, 1), "state": states.float()}
        o = torch.empty(shape.num_tokens, shape.num_value_heads, shape.value_dim, device=self.device)
        after = torch.empty(states.shape, device=self.device)
        starts = shape.starts
        for length in sorted(set(shape.lengths)):
            rows = [row for row, other in enumerate(shape.lengths) if other == length]
            index = torch.tensor([range(starts[row], starts[row] + length) for row in rows], device=self.device)
            found, state = tokens.map(itemgetter(index)).advance(states[rows])
            o[index] = found.float()
            after[rows] = state.float()
        kept = {"waypoints": self._walk_places(tokens, states)} if shape.waypoints else {}
        return {"o": o, "state": after, **kept}

    def _walk_places(self, tokens: T, states: Tensor) -> Tensor:
        """Return the states at the waypoints in fp32: from one to the next, each row from its own of `states`."""
        found: list[Tensor] = []
        for row, done in self.shape.places:
            begin = done - self.shape.waypoints
            state = found[-1] if begin else states[row : row + 1]
            first = self.shape.starts[row]
            part = itemgetter((None, slice(first + begin, first + done)))
            found.append(tokens.map(part).advance(state)[1])
        return torch.cat(found).float()
