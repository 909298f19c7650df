"""A run of a bench: in this process, or in several that begin together and whose samples are joined."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from deltaline_cli.bench.load import Share, opened
from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.samples import Samples
from deltaline_client import DeltalineError

# From "all are ready" to the first step: the start time must reach every process.
_HEAD_START_S = 0.1
_PROGRESS_S = 0.2
_STOP_S = 10.0

OnStep = Callable[[int], None]
OnStart = Callable[[float], None]


class BenchError(RuntimeError):
    """A process of the run failed; the message says why."""


def run(address: str, options: BenchOptions, on_step: OnStep, on_start: OnStart) -> Samples:
    """Drive a server and return what was measured.

    on_step is called with numbers of steps that are done, on_start with the time at which the load begins. However it
    ends, the sequences that were opened are closed, as far as the server lets them be. Raises ValueError for options
    that the server can't take, DeltalineError, BenchError, KeyboardInterrupt.
    """
    if options.processes > 1:
        return _run_processes(address, options, on_step, on_start)

    async def alone() -> Samples:
        async with opened(address, options, Share(0, 1), on_step) as load:
            start_s = time.monotonic()
            on_start(start_s)
            return await load.run(start_s)

    return _interruptible(alone())


def _interruptible(work: Coroutine[Any, Any, Samples]) -> Samples:
    """Run a coroutine; in the main thread SIGTERM cancels it as SIGINT does, so that it can clean up.

    Raises KeyboardInterrupt then.
    """

    async def guarded() -> Samples:
        task = asyncio.current_task()
        assert task is not None
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _run_processes(address: str, options: BenchOptions, on_step: OnStep, on_start: OnStart) -> Samples:
    spawn = get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    parts: list[Samples] = []
    # Each is written by one process alone.
    counters: list[Any] = [spawn.RawValue("q") for _ in range(options.processes)]
    try:
        for number, counter in enumerate(counters):
            mine, theirs = spawn.Pipe()
            share = Share(number, options.processes)
            process = spawn.Process(target=_process, args=(address, options, share, theirs, counter))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for pipe in pipes:
            receive(pipe)
        start_s = time.monotonic() + _HEAD_START_S
        on_start(start_s)
        for pipe in pipes:
            with suppress(ConnectionError):  # it has ended, and its last message says why
                pipe.send(start_s)
        running, counted = list(pipes), 0
        while running:
            ready = wait(running, _PROGRESS_S)
            for pipe in [pipe for pipe in running if pipe in ready]:
                samples = receive(pipe)
                assert isinstance(samples, Samples)
                parts.append(samples)
                running.remove(pipe)
            steps = sum(counter.value for counter in counters)
            on_step(steps - counted)
            counted = steps
    finally:
        for pipe in pipes:
            pipe.close()  # those that still run stop then
        for process in processes:
            process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
    return Samples.join(parts)


def receive(pipe: Connection) -> object:
    """The next message of a process. Raises BenchError with its error, or because it ended without one."""
    try:
        message: object = pipe.recv()
    except (EOFError, ConnectionError):
        raise BenchError("a process of the run ended without a word") from None
    if isinstance(message, str):
        raise BenchError(message)
    return message


def _process(address: str, options: BenchOptions, share: Share, pipe: Connection, counter: Any) -> None:
    """A process: sends None when it is ready, at last its Samples, or the text of an error. Counts its steps."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says when to stop, also after Ctrl-C
    try:
        pipe.send(asyncio.run(_drive(address, options, share, pipe, counter)))
    except (DeltalineError, MemoryError, ValueError) as error:
        with suppress(ConnectionError):
            pipe.send(str(error))
    except (asyncio.CancelledError, ConnectionError):
        pass  # the first process has closed the pipe


async def _drive(address: str, options: BenchOptions, share: Share, pipe: Connection, counter: Any) -> Samples:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    start: asyncio.Future[float] = loop.create_future()

    def listen() -> None:
        with suppress(RuntimeError):  # the loop is over
            try:
                while True:
                    loop.call_soon_threadsafe(start.set_result, pipe.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(this.cancel)

    def count(steps: int) -> None:
        counter.value += steps

    threading.Thread(target=listen, daemon=True).start()
    async with opened(address, options, share, count) as load:
        pipe.send(None)
        return await load.run(await start)
