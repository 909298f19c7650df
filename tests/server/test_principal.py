"""Who waits for what is done one at a time: owners in turn, whoever gives up."""

from __future__ import annotations

import asyncio

from rigs.scheduler_rig import turns

from deltaline_server.principal import FairLock


class Queue:
    """Tasks that want a turn, by name, and who has it."""

    def __init__(self) -> None:
        self._turns, self.had, self._ends = FairLock(), list[str](), asyncio.Event()

    async def want(self, name: str) -> None:
        async with self._turns.turn(ord(name[0])):
            self.had.append(name)
            self._ends.clear()
            await self._ends.wait()

    async def end(self) -> None:
        self._ends.set()
        await turns()


async def test_owners_have_turns_one_after_the_other() -> None:
    queue = Queue()
    tasks = {name: asyncio.create_task(queue.want(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")}
    await turns()
    for _ in range(7):
        await queue.end()
    assert queue.had == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"] and all(task.done() for task in tasks.values())
    again = asyncio.create_task(queue.want("a5"))
    await turns()
    assert queue.had[-1] == "a5"
    await queue.end()
    await again


async def test_who_gives_up_keeps_nobody_waiting() -> None:
    queue = Queue()
    tasks = {name: asyncio.create_task(queue.want(name)) for name in ("a1", "a2", "b1", "b2", "c1")}
    await turns()
    tasks["b1"].cancel()
    tasks["a1"].cancel()  # it has the turn, which b2 gets at once, and gives up as it comes
    await asyncio.sleep(0)
    tasks["b2"].cancel()
    await turns()
    assert queue.had == ["a1", "c1"]
    await queue.end()
    assert queue.had == ["a1", "c1", "a2"]
    await queue.end()
    assert all(task.done() for task in tasks.values())
