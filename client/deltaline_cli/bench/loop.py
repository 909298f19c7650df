"""The closed loop: a step begins when the one before is answered. Knows neither what a step is nor what it costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from deltaline_cli.bench.samples import Sample

Step = Callable[[], Awaitable[Sample]]


async def closed_loop(steps: Sequence[Step], goes_on: Callable[[], bool]) -> AsyncIterator[list[Sample]]:
    """Make each of the steps in turn, again and again; yield the samples of each turn.

    goes_on is asked before each turn. What is compared is made in turns: then both sides find the same machine.
    """
    while goes_on():
        yield [await step() for step in steps]
