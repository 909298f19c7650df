"""A client's stream of steps that loses some of them, and some of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deltaline.wire import Buffer
from deltaline_client import AsyncClient, Unavailable


class FaultyStream:
    """Stands before a client's stream. `fate` says of each step: "sent", "lost" or "unanswered", taken all the same."""

    def __init__(self, client: AsyncClient, fate: Callable[[], str]) -> None:
        """client: one that has made a call."""
        self._stream: Any = client._stream
        self._fate = fate
        self.faults = 0
        client._stream = self  # type: ignore[assignment]

    def send(self, number: int, request: Sequence[Buffer], mailbox: Any) -> None:
        fate = self._fate()
        self.faults += fate != "sent"
        if fate == "lost":
            mailbox.put_nowait((number, Unavailable("lost")))
        else:
            self._stream.send(number, request, mailbox if fate == "sent" else _Unanswered(mailbox))

    async def close(self) -> None:
        await self._stream.close()


class _Unanswered:
    """A mailbox in which every answer is lost."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def put_nowait(self, answer: tuple[int, object]) -> None:
        self._mailbox.put_nowait((answer[0], Unavailable("lost")))
