"""The load of one process: its clients step in a closed or an open loop, and each step is noted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self

import numpy as np

from deltaline_cli.bench.arrivals import ArrivalThread, arrivals
from deltaline_cli.bench.client import BenchClient, connected
from deltaline_cli.bench.loop import closed_loop
from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.samples import COLUMNS, Sample, Samples
from deltaline_client import DeltalineError

# For closing what is open on a server that has failed a call: it may be slow, or gone.
CLOSE_S = 3.0


@dataclass(frozen=True)
class Share:
    """What one of `processes` processes drives: every process-th client, and that share of the rate and the steps."""

    process: int
    processes: int

    def clients(self, options: BenchOptions) -> range:
        """Numbers of its clients."""
        return range(self.process, options.clients, self.processes)

    def steps(self, options: BenchOptions) -> int | None:
        """Steps that it measures, None when a duration ends the run."""
        if options.steps is None:
            return None
        return len(range(self.process, options.steps, self.processes))

    def rate(self, options: BenchOptions) -> float:
        """Steps per second: Poisson processes add up to a Poisson process."""
        return (options.rate or 0.0) * len(self.clients(options)) / options.clients


class InlineNotes(logging.Handler):
    """Keeps what the client logs about shared memory within the block: all of it is about tensors that go inline."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        self._logger = logging.getLogger("deltaline_client")
        self._level_before = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text if it is about shared memory."""
        text = record.getMessage()
        if "shared memory" in text:
            self.texts.append(text)

    def __enter__(self) -> Self:
        self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)


@asynccontextmanager
async def opened(
    address: str, options: BenchOptions, share: Share, on_step: Callable[[int], None]
) -> AsyncIterator[Load]:
    """The load of a share of the clients: their sequences are open, and a first step of each kind is made.

    Sequences are closed afterwards; after an error, within CLOSE_S, as far as the server lets them be. on_step is
    called with the number of steps done since the last call. Raises ValueError when the server can't take such a run;
    DeltalineError.
    """
    async with AsyncExitStack() as stack:
        notes = stack.enter_context(InlineNotes())
        clients: list[BenchClient] = []
        try:
            for number in share.clients(options):
                clients.append(await stack.enter_async_context(connected(address, options, seed=number)))
                await clients[-1].prepare()
            yield Load(clients, notes, options, share, on_step)
        except BaseException:
            with suppress(DeltalineError, TimeoutError):  # the first error is the one to tell
                await _close(clients, CLOSE_S)
            raise
        await _close(clients)


async def _close(clients: list[BenchClient], within_s: float | None = None) -> None:
    """Close the sequences of all clients at once, to the end also where the caller is cancelled meanwhile: it is where
    another process has failed. Raises the first DeltalineError, TimeoutError."""
    closes = asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
    closing = asyncio.ensure_future(asyncio.wait_for(closes, within_s))
    try:
        results = await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing
        raise
    for result in results:
        if result is not None:
            raise result


class Load:
    """Some clients of a bench, which `run` makes step."""

    def __init__(
        self,
        clients: list[BenchClient],
        notes: InlineNotes,
        options: BenchOptions,
        share: Share,
        on_step: Callable[[int], None],
    ) -> None:
        self._clients, self._notes, self._options, self._share = clients, notes, options, share
        self._on_step = on_step
        self._samples: list[Sample] = []
        self._unserved: list[float] = []
        self._steps_left = share.steps(options)

    async def run(self, start_s: float) -> Samples:
        """Load the server from `start_s` on, ramp-up first, then what is measured; return all samples.

        Raises DeltalineError when a step fails, and ValueError when tensors went inline that should have been in shared
        memory: such a run measures something else.
        """
        begin_s = start_s + self._options.ramp_up_s
        end_s = begin_s + self._options.duration_s if self._options.steps is None else float("inf")
        rng = np.random.default_rng([1, self._share.process])
        open_loop = self._options.rate is not None
        source = ArrivalThread(
            arrivals(self._share.rate(self._options) or 1.0, self._options.ramp_up_s, rng), start_s, end_s
        )
        if open_loop:
            source.start()
        cpu_s = asyncio.create_task(_cpu_seconds_from(begin_s))
        try:
            async with asyncio.TaskGroup() as group:
                for index, client in enumerate(self._clients):
                    if open_loop:
                        group.create_task(self._serve(client, source, begin_s, end_s))
                    else:
                        delay_s = self._options.ramp_up_s * index / len(self._clients)
                        group.create_task(self._loop(client, start_s + delay_s, begin_s, end_s))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            source.stop()
            cpu_s.cancel()
            with suppress(asyncio.CancelledError):
                await cpu_s
        if self._options.shared_memory_bytes and self._notes.texts:
            raise ValueError(f"--shared-memory-bytes: not all tensors went through it: {self._notes.texts[0]}")
        now_s = time.monotonic()
        if self._options.steps is not None:  # until the last step was done; of an open loop, until it was due
            when = COLUMNS.index("due" if open_loop else "done")
            end_s = max((sample[when] for sample in self._samples), default=now_s)
        used = time.process_time() - (cpu_s.result() if not cpu_s.cancelled() else time.process_time())
        return Samples.of(self._samples, begin_s, end_s, self._unserved, used / max(now_s - begin_s, 1e-9))

    async def _loop(self, client: BenchClient, from_s: float, begin_s: float, end_s: float) -> None:
        """Closed: the next step when the last is answered."""
        await asyncio.sleep(max(0.0, from_s - time.monotonic()))

        def goes_on() -> bool:
            return (now_s := time.monotonic()) < end_s and self._takes_one(is_measured=now_s >= begin_s)

        async for [sample] in closed_loop([lambda: client.step(client.draw())], goes_on):
            self._note(sample)

    async def _serve(self, client: BenchClient, source: ArrivalThread, begin_s: float, end_s: float) -> None:
        """Open: whichever client is idle takes the step that is due longest; late ones too, but not for ever."""
        while (arrival := await source.queue.get()) is not None:
            due_s, late_s = arrival
            if time.monotonic() > end_s + self._options.timeout_s:
                self._unserved.append(due_s)
            elif self._takes_one(is_measured=due_s >= begin_s):
                self._note(await client.step(client.draw(), due_s, late_s))
            else:
                break
        source.stop()
        source.queue.put_nowait(None)  # for the next client

    def _takes_one(self, *, is_measured: bool) -> bool:
        """Count a step that begins; False when all that were asked for have begun."""
        if self._steps_left is None or not is_measured:
            return True
        self._steps_left -= 1
        return self._steps_left >= 0

    def _note(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._on_step(1)


async def _cpu_seconds_from(begin_s: float) -> float:
    """The processor time that this process has used when the measuring begins."""
    await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
    return time.process_time()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors that ended the clients: the others are like it."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
