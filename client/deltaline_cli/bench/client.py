"""One client of a bench: its connection, its sequences, and how it makes a step of a kind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from deltaline_cli.bench.options import KINDS, BenchOptions, Kind
from deltaline_cli.bench.samples import Sample
from deltaline_client import AsyncClient, DeltalineError, Row

# Hidden states are cut from a block that is drawn once: drawing takes longer than a step.
_BLOCK_TOKENS = 1024


@asynccontextmanager
async def prepared(address: str, options: BenchOptions, seed: int) -> AsyncIterator[BenchClient]:
    """A client that is ready to step. Its sequences are closed afterwards, unless the server failed.

    Raises ValueError when the server can't take such a run; DeltalineError.
    """
    connection = AsyncClient(address, timeout=options.timeout_s, shared_memory_bytes=options.shared_memory_bytes)
    async with connection:
        client = BenchClient(connection, options, seed)
        try:
            await client.prepare()
            yield client
        except DeltalineError:
            raise
        except BaseException:
            await client.close()
            raise
        await client.close()


class BenchClient:
    """A client with `rows` sequences, all in each decode or verify step, and one more that takes the prefills."""

    def __init__(self, client: AsyncClient, options: BenchOptions, seed: int) -> None:
        self._client = client
        self._options = options
        self._rng = np.random.default_rng(seed)
        self._kinds = list(options.mix)
        self._weights = np.array(list(options.mix.values())) / sum(options.mix.values())
        self._sequences: list[Any] = []
        # Outputs are dropped at once: they need not be copied out of shared memory.
        self._step_options: Any = {"copy": False} if options.shared_memory_bytes else {}

    async def prepare(self) -> None:
        """Open the sequences, and make one step of each kind, so that nothing is done for the first time later.

        Raises ValueError when the server can't take such a run.
        """
        info = await self._client.info()
        self._options.check(info)
        tokens = _BLOCK_TOKENS + self._options.rows
        block = self._rng.standard_normal((tokens, *info.input_shape()), dtype=np.float32)
        self._block = await self._placed(block.astype(info.dtype))
        self._sequences = list(await self._client.open_many(self._options.sequences))
        for kind in self._kinds:
            await self.step(kind)

    async def _placed(self, block: Any) -> Any:
        """The block in shared memory, if half of that holds it: a step takes rows of it without a copy."""
        if 2 * block.nbytes > self._options.shared_memory_bytes:
            return block
        room = await self._client.empty(block.shape)
        room[...] = block
        return room

    def draw(self) -> Kind:
        """Choose the kind of the next step as the mix has it."""
        return self._kinds[int(self._rng.choice(len(self._kinds), p=self._weights))]

    async def step(self, kind: Kind, due_s: float | None = None, late_s: float = 0.0) -> Sample:
        """Make one step; due_s is when it should have been sent, now by default. Raises DeltalineError."""
        rows, tokens = self._rows(kind)
        sent_s = time.monotonic()
        result = await self._client.step(rows, **self._step_options)
        done_s = time.monotonic()
        if kind == "verify":
            accepted = self._rng.integers(0, self._options.drafts + 1, len(rows)).tolist()
            await self._client.commit([row.sequence for row in rows], accepted)
        timing = result.timing
        stages = (timing.queue_s, timing.copy_in_s, timing.compute_s, timing.copy_out_s)
        return (KINDS.index(kind), tokens, sent_s if due_s is None else due_s, late_s, sent_s, done_s, *stages)

    def _rows(self, kind: Kind) -> tuple[list[Row], int]:
        """The rows of a step, and how many tokens they have in all."""
        if kind == "prefill":
            length = self._options.prefill_tokens.draw(self._rng)
            return [Row.prefill(self._sequences[-1], self._hidden(length))], length
        live = self._sequences[: self._options.rows]
        tokens = 1 if kind == "decode" else self._options.drafts
        hidden = self._hidden(tokens * len(live)).reshape(len(live), tokens, *self._block.shape[1:])
        make = Row.decode if kind == "decode" else Row.verify
        return [make(sequence, part) for sequence, part in zip(live, hidden, strict=True)], tokens * len(live)

    def _hidden(self, tokens: int) -> Any:
        if tokens >= len(self._block):
            return np.resize(self._block, (tokens, *self._block.shape[1:]))
        first = int(self._rng.integers(0, len(self._block) - tokens))
        return self._block[first : first + tokens]

    async def close(self) -> None:
        """Close the sequences on the server."""
        if self._sequences:
            await self._client.close(self._sequences)
