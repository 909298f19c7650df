"""What calls did that carry a request id, so that the same call sent again does nothing twice.

A call's work is a task of its own: it goes on when the call that began it ends, and the same call sent again waits for
it, or gets the reply that it had. Knows neither messages nor what is done; all methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal

LIFE_S = 60.0
LIMIT_BYTES = 16 * 2**20
# Works at a time: those of calls that ended are no longer bounded by what bounds calls.
MAX_RUNNING = 1024
# What one costs beside its reply; 382 to 402 as tracemalloc counts them (2026-11-23, Python 3.11).
ENTRY_BYTES = 400

Key = tuple[str, bytes]
"""A method and a request id."""
Work = Callable[[], Coroutine[Any, Any, bytes]]


@dataclass(frozen=True)
class _Outcome:
    content: bytes
    reply: bytes
    until_s: float


class RequestIds:
    """Replies of the last minute by principal, method and id, of at most `limit_bytes`; when that is short the
    principal that has most loses its oldest. A principal may begin work as long as it leaves as much to all others.

    What was refused is forgotten at once: nothing was done, and the same call may succeed later.

    Attributes: num_repeated, how many calls were answered by what another did.
    """

    def __init__(self, clock: Callable[[], float], limit_bytes: int = LIMIT_BYTES) -> None:
        """clock: monotonic seconds."""
        self._clock, self._limit_bytes = clock, limit_bytes
        self.num_repeated = self.used_bytes = 0
        # By the principal's number.
        self._running: dict[tuple[int, Key], tuple[bytes, asyncio.Task[bytes]]] = {}
        self._done: dict[int, OrderedDict[Key, _Outcome]] = {}
        self._bytes_of: dict[int, int] = {}
        self._running_of = Counter[int]()

    async def once(
        self,
        principal: Principal,
        method: str,
        request_id: bytes,
        content: bytes,
        work: Work,
    ) -> bytes:
        """The reply of a principal's call: of the work, if no call of the method with this id has begun it before.

        content: the `digest` of what the call asks for, everywhere. A call that is cancelled cancels no work. Raises
        what the work raises, and RequestError INVALID_REQUEST when the id came with other content before;
        TOO_MANY_CALLS.
        """
        reply = self.find(principal, method, request_id, content)
        if reply is not None:
            return reply
        number, key = principal.number, (method, request_id)
        running = self._running.get((number, key))
        if running is not None:
            self.num_repeated += 1
            return await asyncio.shield(running[1])
        self._check_room(number)
        task = asyncio.create_task(self._run(number, key, content, work))
        task.add_done_callback(_heard)
        self._running[number, key] = content, task
        self._running_of[number] += 1
        return await asyncio.shield(task)

    def find(self, principal: Principal, method: str, request_id: bytes, content: bytes) -> bytes | None:
        """The reply that a call had which is done, None where there was none, or it is under way. Raises as `once` for
        other content."""
        number, key = principal.number, (method, request_id)
        self._forget_old(number)
        running, kept = self._running.get((number, key)), self._done.get(number)
        done = None if kept is None else kept.get(key)
        before = running[0] if running is not None else done.content if done is not None else None
        if before not in (None, content):
            message = "request_id: it came with another request before; draw a new one for each call"
            raise RequestError(Reason.INVALID_REQUEST, message, field="request_id")
        if done is None:
            return None
        self.num_repeated += 1
        return done.reply

    def add(self, principal: Principal, method: str, request_id: bytes, content: bytes, reply: bytes) -> None:
        """A call that `find` knew nothing of was done without waiting for anything."""
        outcome = _Outcome(content, reply, self._clock() + LIFE_S)
        self._keep(principal.number, (method, request_id), outcome)

    async def close(self) -> None:
        """End what runs; after the last call."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, number: int, key: Key, content: bytes, work: Work) -> bytes:
        try:
            reply = await work()
            self._keep(number, key, _Outcome(content, reply, self._clock() + LIFE_S))
        finally:
            del self._running[number, key]
            self._running_of[number] -= 1
        return reply

    def _check_room(self, number: int) -> None:
        own, free = self._running_of[number], MAX_RUNNING - len(self._running)
        if free <= own or not free:
            message = (
                f"{len(self._running)} of {MAX_RUNNING} calls of this kind are under way, {own} of them this caller's"
            )
            raise RequestError(Reason.TOO_MANY_CALLS, message, retry_after_s=0.1)

    def _keep(self, number: int, key: Key, outcome: _Outcome) -> None:
        kept = self._done.setdefault(number, OrderedDict())
        former = kept.pop(key, None)
        if former is not None:
            self._count(number, former, -1)
        kept[key] = outcome
        self._count(number, outcome, 1)
        while self.used_bytes > self._limit_bytes:
            self._forget_oldest(max(self._bytes_of, key=lambda one: self._bytes_of[one]))

    def _forget_old(self, number: int) -> None:
        kept, now_s = self._done.get(number), self._clock()
        while kept and next(iter(kept.values())).until_s <= now_s:
            self._forget_oldest(number)

    def _forget_oldest(self, number: int) -> None:
        kept = self._done[number]
        _, outcome = kept.popitem(last=False)
        self._count(number, outcome, -1)
        if not kept:
            del self._done[number], self._bytes_of[number]

    def _count(self, number: int, outcome: _Outcome, sign: int) -> None:
        num_bytes = sign * (len(outcome.reply) + ENTRY_BYTES)
        self.used_bytes += num_bytes
        self._bytes_of[number] = self._bytes_of.get(number, 0) + num_bytes


def _heard(task: asyncio.Task[bytes]) -> None:
    """Every caller may have gone before the work failed."""
    if not task.cancelled():
        task.exception()


def digest(content: bytes) -> bytes:
    """What tells what a call asks for from all else."""
    return blake2b(content, digest_size=16).digest()
