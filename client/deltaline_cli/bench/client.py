"""One client of a bench: its connection, its sequences, and how it makes a step of a kind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from deltaline_cli.bench.options import BenchOptions, Kind
from deltaline_cli.bench.samples import Sample, sample
from deltaline_client import AsyncClient, AsyncSequence, DeltalineError, Output, Row, ServerInfo

# Hidden states are cut from a block that is drawn once: drawing takes longer than a step.
_BLOCK_TOKENS = 1024


@asynccontextmanager
async def connected(address: str, options: BenchOptions, seed: int) -> AsyncIterator[BenchClient]:
    """A client that has no sequences yet, and whose connection lasts for the block. Raises ValueError."""
    connection = AsyncClient(
        address,
        timeout=options.timeout_s,
        shared_memory_bytes=options.shared_memory_bytes,
        tls=options.tls,
        token=options.token,
        token_file=options.token_file,
    )
    async with connection:
        yield BenchClient(connection, options, seed)


class BenchClient:
    """A client with `rows` sequences, all in each decode or verify step, and one more that takes the prefills."""

    def __init__(self, client: AsyncClient, options: BenchOptions, seed: int) -> None:
        self._client = client
        self._options = options
        self._rng = np.random.default_rng(seed)
        self._kinds = list(options.mix)
        self._weights = np.array(list(options.mix.values())) / sum(options.mix.values())
        self._sequences: list[AsyncSequence] = []
        self._opening: asyncio.Task[list[AsyncSequence]] | None = None

    async def prepare(self) -> None:
        """Open the sequences, and make one step of each kind, so that nothing is done for the first time later.

        Raises ValueError when the server can't take such a run.
        """
        info = await self._client.info()
        self._options.check(info)
        self._longest, self._room = info.max_context or math.inf, self._options.room(info)
        self._block = await self._drawn(info)
        self._sequences = list(await self._open(self._options.sequences))
        for kind in self._kinds:
            await self.step(kind)

    async def _open(self, count: int) -> list[AsyncSequence]:
        """Open sequences, which `close` closes also where this is cancelled before the server's answer came."""
        self._opening = asyncio.ensure_future(self._client.open_many(count))
        return await asyncio.shield(self._opening)

    async def _drawn(self, info: ServerInfo) -> Any:
        """Hidden states that steps take rows of: in shared memory, without a copy, if half of that holds them."""
        shape = info.input_shape()
        block = self._rng.standard_normal((_BLOCK_TOKENS, *shape), dtype=np.float32).astype(info.dtype)
        for tokens in (_BLOCK_TOKENS + self._options.longest, _BLOCK_TOKENS):
            if 2 * tokens * block[0].nbytes <= self._options.shared_memory_bytes:
                room = await self._client.empty((tokens, *shape))
                room[...] = np.resize(block, room.shape)
                return room
        return block

    def draw(self) -> Kind:
        """Choose the kind of the next step as the mix has it."""
        return self._kinds[int(self._rng.choice(len(self._kinds), p=self._weights))]

    async def step(self, kind: Kind, due_s: float | None = None, late_s: float = 0.0) -> Sample:
        """Make one step; due_s is when it should have been sent, now by default. Raises DeltalineError.

        A sequence that has no room for its tokens is replaced before, in time that is not the step's: it is due later.
        """
        tokens = self._tokens(kind)
        begin_s = time.monotonic()
        sequences = await self._with_room(kind, tokens)
        if due_s is not None:
            due_s += time.monotonic() - begin_s
        hidden = self._hidden(tokens * len(sequences)).reshape(len(sequences), tokens, *self._block.shape[1:])
        make = {"prefill": Row.prefill, "decode": Row.decode, "verify": Row.verify}[kind]
        rows = [make(sequence, part) for sequence, part in zip(sequences, hidden, strict=True)]
        output: Output = self._options.prefill_output if kind == "prefill" else "all"
        sent_s = time.monotonic()
        # Outputs are dropped at once: they need not be copied out of shared memory.
        result = await self._client.step(rows, output=output, copy=not self._options.shared_memory_bytes)
        done_s = time.monotonic()
        if kind == "verify":
            accepted = self._rng.integers(0, self._options.drafts + 1, len(rows)).tolist()
            await self._client.commit([row.sequence for row in rows], accepted)
        timing = result.timing
        stages = (timing.queue_s, timing.copy_in_s, timing.compute_s, timing.copy_out_s)
        return sample(kind, tokens * len(rows), sent_s, done_s, stages, due_s=due_s, late_s=late_s)

    def _tokens(self, kind: Kind) -> int:
        """How many tokens each row of a step has."""
        if kind == "prefill":
            return int(min(self._options.prefill_tokens.draw(self._rng), self._longest))
        return 1 if kind == "decode" else self._options.drafts

    async def _with_room(self, kind: Kind, tokens: int) -> list[AsyncSequence]:
        """The sequences of a step; those that have no room for so many tokens more are closed, and new ones opened."""
        places = [len(self._sequences) - 1] if kind == "prefill" else range(self._options.rows)
        used = {place: self._sequences[place].position for place in places}
        full = [place for place, position in used.items() if position and position + tokens > self._room]
        if full:
            await self._client.close([self._sequences[place] for place in full])
            for place, sequence in zip(full, await self._open(len(full)), strict=True):
                self._sequences[place] = sequence
        return [self._sequences[place] for place in places]

    def _hidden(self, tokens: int) -> Any:
        if tokens >= len(self._block):
            return np.resize(self._block, (tokens, *self._block.shape[1:]))
        first = int(self._rng.integers(0, len(self._block) - tokens))
        return self._block[first : first + tokens]

    async def close(self) -> None:
        """Close the sequences on the server, those among them that are being opened."""
        sequences = dict.fromkeys(self._sequences)
        if self._opening is not None:
            with suppress(DeltalineError):  # whoever opened them was told
                sequences |= dict.fromkeys(await self._opening)
        if sequences:
            await self._client.close(list(sequences))
