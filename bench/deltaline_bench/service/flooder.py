"""A process that floods a server with one call, each anew when it is answered, until it is ended.

    python -m deltaline_bench.service.flooder ADDRESS METHOD BODY TOKEN CALLS

BODY is a message in hexadecimal digits, CALLS how many are on their way at a time. It says how the first ended, by
the name of its status.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc


async def flood(address: str, method: str, body: bytes, token: str, num_calls: int) -> None:
    """Flood until the task is cancelled."""
    metadata, has_begun = (("authorization", f"Bearer {token}"),), False
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(method)

        async def go_on() -> None:
            nonlocal has_begun
            while True:
                answered = call(body, metadata=metadata, wait_for_ready=True)
                code = await answered.code()
                if not has_begun:
                    has_begun = True
                    print(code.name, flush=True)

        await asyncio.gather(*(go_on() for _ in range(num_calls)))


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
