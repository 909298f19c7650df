"""A process that keeps a server busy with calls that it accepts, of many clients at a time, while it is told to.

    python -m deltaline_bench.service.crowd ADDRESS TOKEN ROWS TOKENS CLIENT...

CLIENT... are their numbers. The first PEERS are as a peer at its fair share: they decode ROWS sequences at a time and
prefill TOKENS. Others decode one, prefill less, and beside that renew leases, describe, open, close and fork sequences,
and make snapshots. It says a word when all have begun; each line that it reads lets it go on, or stand still.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from numpy.typing import NDArray

from deltaline_client import AsyncClient, AsyncSequence, DeltalineError

PEERS = 2


class Crowd:
    """Clients that go on while `goes_on` is set. num_refused: calls that did not end well."""

    def __init__(self, address: str, token: str, rows: int, tokens: int) -> None:
        self._address, self._token, self._rows, self._tokens = address, token, rows, tokens
        self.goes_on = asyncio.Event()
        self.num_refused = 0

    async def join(self, number: int, begun: asyncio.Event) -> None:
        """Be one of the clients, until the task is cancelled."""
        is_peer = number < PEERS
        rows, num_tokens = (self._rows, self._tokens) if is_peer else (1, self._tokens // 8)
        async with AsyncClient(self._address, token=self._token) as client:
            info = await client.info()
            hidden = np.random.default_rng(number).standard_normal((self._tokens, info.hidden_size), dtype=np.float32)
            held = hidden.astype(info.dtype)
            sequences = await client.open_many(rows)
            begun.set()
            while True:
                try:
                    await self._step(client, sequences, held, num_tokens)
                    if not is_peer:
                        await self._all_else(client, sequences[0])
                except DeltalineError:
                    self.num_refused += 1
                    await client.close(sequences)
                    sequences = await client.open_many(rows)

    async def _step(
        self, client: AsyncClient, sequences: list[AsyncSequence], hidden: NDArray[np.generic], num_tokens: int
    ) -> None:
        """Decode, and prefill."""
        for _ in range(8):
            await self.goes_on.wait()
            await client.decode(sequences, hidden[: len(sequences)])
        await sequences[0].prefill(hidden[:num_tokens], output="last")

    async def _all_else(self, client: AsyncClient, sequence: AsyncSequence) -> None:
        """Make the other kinds of calls."""
        await self.goes_on.wait()
        await client.renew([sequence])
        await client.describe([sequence])
        async with await client.open():
            pass
        [child] = await sequence.fork(1)
        await child.close()
        [snapshot] = await client.snapshots.create([sequence])
        await snapshot.release()


async def main(address: str, token: str, rows: int, tokens: int, numbers: list[int]) -> None:
    """Go on and stand still, as told; end with the input."""
    crowd, begun = Crowd(address, token, rows, tokens), [asyncio.Event() for _ in numbers]
    clients = [asyncio.create_task(crowd.join(*one)) for one in zip(numbers, begun, strict=True)]
    await asyncio.gather(*(one.wait() for one in begun))
    print("begun", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        (crowd.goes_on.clear if crowd.goes_on.is_set() else crowd.goes_on.set)()
    print(crowd.num_refused, flush=True)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:5]), [int(number) for number in sys.argv[5:]]))
