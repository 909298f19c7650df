"""How long a stream of bytes may take: who stands still keeps memory from others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from deltaline_server.errors import Reason, RequestError

Message = TypeVar("Message")


@dataclass(frozen=True)
class Pace:
    """pause_s: of one message. whole_s: of all of a call."""

    pause_s: float = 30.0
    whole_s: float = 600.0

    @asynccontextmanager
    async def upload(self, messages: AsyncIterator[Message]) -> AsyncIterator[AsyncIterator[Message]]:
        """The messages that a client sends, to be taken inside the context. Raises RequestError UPLOAD_TIMEOUT when one
        of them lets wait for too long."""
        try:
            async with asyncio.timeout(self.whole_s):
                yield self._patiently(messages)
        except TimeoutError as error:
            message = f"the messages did not come within {self.pause_s:g} seconds each, {self.whole_s:g} in all"
            raise RequestError(Reason.UPLOAD_TIMEOUT, message) from error

    async def _patiently(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """The messages. Raises TimeoutError when one lets wait for longer."""
        while True:
            async with asyncio.timeout(self.pause_s):
                message = await anext(messages, None)
            if message is None:
                return
            yield message
            del message  # or a stream that stalls would hold its last one


PACE = Pace()
