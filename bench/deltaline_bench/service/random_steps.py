"""Steps of random rows, kinds and lengths, of sequences that come and go, each answer checked. Knows a client alone."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_client import AsyncClient, AsyncSequence, Output, Row, RowOutcome, ServerInfo, StepResult

PREFILL, DECODE, VERIFY = KINDS = ("prefill", "decode", "verify")
# Of rows, and of steps of which a sequence is closed behind.
SHARES, CLOSED_SHARE = (0.05, 0.65, 0.3), 0.1


class WrongAnswerError(RuntimeError):
    """A row's answer is not what a row of its tokens has; the message says which."""


@dataclass
class Walked:
    """What was done. seconds: of each step. rows: by their kinds. accepted: tokens of verifies that were committed."""

    seconds: list[float] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    commits: int = 0
    accepted: int = 0
    closed: int = 0


class Walk:
    """Sequences of one client, and random steps of them."""

    def __init__(self, client: AsyncClient, info: ServerInfo, num_sequences: int, tokens: int, seed: int) -> None:
        """tokens: most of a prefill."""
        self._client, self._info, self._num_sequences = client, info, num_sequences
        self._rng = np.random.default_rng(seed)
        self._room = room_of(info, num_sequences)
        size = (min(tokens, self._room), *info.input_shape())
        self._block = self._rng.standard_normal(size, dtype=np.float32).astype(info.dtype)
        self._open: list[AsyncSequence] = []
        self.walked = Walked()

    async def run(self, steps: int) -> Walked:
        """Make so many steps. Raises WrongAnswerError; DeltalineError as the client, where a row failed."""
        self._open = await self._client.open_many(self._num_sequences)
        for _ in range(steps):
            await self._step()
            if self._rng.random() < CLOSED_SHARE:
                await self._renew(self._open[int(self._rng.integers(len(self._open)))])
        await self._client.close(self._open)
        return self.walked

    async def _step(self) -> None:
        """Make one step, and commit as many drafts of each of its verifies as chance accepts."""
        rng, walked = self._rng, self.walked
        places = rng.permutation(len(self._open))[: self._draw(len(self._open))]
        rows = [await self._row(int(place)) for place in places]
        output: Output = "all" if rng.integers(2) else "last"
        begin_s = time.perf_counter()
        answer = await self._client.step(rows, output=output)
        walked.seconds.append(time.perf_counter() - begin_s)
        check(rows, answer, output, self._info)
        drafts = [row.sequence for row in answer.rows if row.sequence.progress().pending_tokens]
        if drafts:
            accepted = [int(rng.integers(one.progress().pending_tokens + 1)) for one in drafts]
            await self._client.commit(drafts, accepted)
            walked.commits += len(drafts)
            walked.accepted += sum(accepted)

    async def _row(self, place: int) -> Row:
        """Draw a row of a sequence, of a new one in its place where it has no room for the row."""
        rng, block = self._rng, self._block
        kind = KINDS[int(rng.choice(len(KINDS), p=SHARES))]
        if kind == VERIFY and self._info.max_draft_tokens == 0:
            kind = DECODE
        most = {PREFILL: len(block), DECODE: 1, VERIFY: min(self._info.max_draft_tokens, len(block))}[kind]
        count = self._draw(most)
        if self._open[place].position + count > self._room:
            await self._renew(self._open[place])
        self.walked.rows[kind] += 1
        self.walked.tokens += count
        sequence, begin = self._open[place], int(rng.integers(len(block) - count + 1))
        make = {PREFILL: Row.prefill, DECODE: Row.decode, VERIFY: Row.verify}[kind]
        return make(sequence, block[begin : begin + count])

    def _draw(self, most: int) -> int:
        """Draw 1 .. most, small numbers as often as large ones: each has graphs of its size."""
        return min(most, int(math.exp(self._rng.random() * math.log(most + 1))))

    async def _renew(self, sequence: AsyncSequence) -> None:
        """Close a sequence and open another in its place."""
        place = self._open.index(sequence)
        await self._client.close([sequence])
        [self._open[place]] = await self._client.open_many(1)
        self.walked.closed += 1


def room_of(info: ServerInfo, num_sequences: int) -> int:
    """Most tokens that each of so many sequences may have at once."""
    if not info.kv_pages:
        return 2**31
    return min(info.max_context, info.kv_pages // num_sequences * info.kv_page_tokens)


def check(rows: list[Row], answer: StepResult, output: Output, info: ServerInfo) -> None:
    """Raise WrongAnswerError unless each row was applied, and has the outputs that were asked for, all finite."""
    for i, (row, found) in enumerate(zip(rows, answer.rows, strict=True)):
        hidden: NDArray[Any] = np.asarray(row.hidden)
        shape = (len(hidden) if output == "all" else 1, *info.output_shape())
        is_applied = found.outcome is not RowOutcome.REFUSED and found.tokens == len(hidden)
        if not (is_applied and found.output.shape == shape and np.isfinite(found.output).all()):
            raise WrongAnswerError(
                f"row {i} of {len(hidden)} tokens: expected to be applied, with finite outputs {list(shape)}, got "
                f"{found.outcome.name}, {found.tokens} tokens, outputs {list(found.output.shape)}"
            )
