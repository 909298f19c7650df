"""The engine: owns the device thread, which computes batches in the order in which they were submitted."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.engine.executor import Executor, Launched, Report
from deltaline_server.tables.pages import PagesPlaced

logger = logging.getLogger(__name__)

OnDone = Callable[[BatchResult], None]

# A batch of so many bytes, in and out, takes less time to copy than two threads take to wake.
SMALL_BYTES = 1 << 20
# While a thread has something to launch, whoever polls sleeps for so long: the interpreter's lock, once released by
# one who takes it again at once, goes to no other for milliseconds.
YIELD_S = 50e-6


@dataclass(slots=True, eq=False)
class _Submitted:
    """A batch, who waits for its result, and, once it was launched, how to ask for that."""

    batch: StepBatch
    on_done: OnDone
    launched: Launched | None = None

    def is_done(self) -> bool:
        """Whether it is done; so is one whose device can't tell, which its result will say."""
        assert self.launched is not None
        try:
            return self.launched.is_done()
        except Exception:
            return True


@dataclass(frozen=True)
class _Change:
    """A change of the state that is no batch, and what it is for the log."""

    apply: Callable[[], None]
    what: str


@dataclass(frozen=True)
class _Prepare:
    report: Report
    done: Future[None]


class Engine:
    """Owns the device thread: batches and changes of lines and pages run on it in the order of their submission.

    `submit`, `zero_lines`, `place_pages`, `transfer` and `poll` wait for no computation and belong to one thread. Where
    a device computes by itself, a second thread waits for its results, so that the next batch is launched meanwhile.
    Threads wake slowly: a small batch of a caller who polls is launched by `submit` and completed by `poll`, when no
    thread has one to launch.
    """

    def __init__(self, executor: Executor, device: torch.device) -> None:
        self._executor, self._device = executor, device
        self._tasks: queue.SimpleQueue[_Submitted | _Change | _Prepare | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name="device", daemon=False)]
        if executor.is_asynchronous:
            self._threads.append(threading.Thread(target=self._collect, name="results", daemon=False))
        self._lock = threading.Lock()
        self._polled: deque[_Submitted] = deque()
        self._unfinished = self._queued = 0
        self._turn = time.monotonic()
        self._is_started = self._is_closed = self._has_failed = False

    def start(self) -> None:
        """Start the threads.

        The device is the calling thread's current one from now on, as `submit` and `poll` need it there.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._is_started = True
        for thread in self._threads:
            thread.start()

    def prepare(self, report: Report) -> Future[None]:
        """Let the device compile and allocate what batches need. `report` is called on the device thread."""
        done: Future[None] = Future()
        self._put(_Prepare(report, done))
        return done

    def submit(self, batch: StepBatch, on_done: OnDone, polls: bool = False) -> None:
        """Compute a batch. `on_done` is called once, also when the computation fails: on a thread of the engine, or, if
        the caller polls, by `poll`.

        Batches are computed and completed in the order of submission, but that a thread may complete one before the
        polled batch in front of it. The batch's arrays must stay as they are until then. Raises RuntimeError
        after `close`.
        """
        submitted = _Submitted(batch, on_done)
        if polls and self._executor.is_asynchronous and batch.copied_bytes <= SMALL_BYTES and self._may_launch():
            self._launch(submitted)
            self._polled.append(submitted)
        else:
            self._put(submitted)

    def poll(self) -> bool:
        """Complete batches that are done and wait for this; return whether more of them are to come."""
        while self._polled and (done := self._take_polled()) is not None:
            self._deliver(done)
        if self._polled and self._queued:
            time.sleep(YIELD_S)
        return bool(self._polled)

    def zero_lines(self, lines: NDArray[np.int64]) -> None:
        """Zero every tensor of these lines in every layer, after the batches submitted before and before those after.

        An engine that could not do it computes nothing more: `failed` is True. Raises RuntimeError after `close`.
        """
        lines = lines.copy()
        self._order(_Change(lambda: self._executor.zero(lines), f"zeroing {len(lines)} lines"))

    def place_pages(self, placed: PagesPlaced) -> None:
        """Write rows of the table of pages and copy pages in every layer, in the same order, and failing alike.

        Its arrays must stay as they are.
        """
        self._order(_Change(lambda: self._executor.place_pages(placed), f"placing pages of {len(placed.lines)} lines"))

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        """Let work copy between the device's memory and the host's: after what was submitted before, beside the batches
        behind it. Whoever asks sees to it that these neither write what is read nor read what is written.

        work: called once, on a thread of the engine. Raises RuntimeError after `close`.
        """
        done: Future[None] = Future()

        def begin() -> None:
            try:
                self._executor.transfer(work).add_done_callback(lambda ended: _pass_on(ended, done))
            except Exception as error:
                done.set_exception(error)
                raise

        self._order(_Change(begin, "a transfer"))
        return done

    def heartbeat_s(self) -> float:
        """Seconds since a thread last began or ended a task while there is work; 0.0 when idle."""
        with self._lock:
            return time.monotonic() - self._turn if self._unfinished else 0.0

    def failed(self) -> bool:
        """Whether the device is lost, so that every later batch fails too."""
        return self._has_failed or self._executor.is_gone

    def close(self) -> None:
        """Finish what was submitted and end the threads; of a device that is gone nothing is waited for. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._tasks.put(None)
        if self._executor.is_gone:
            self._executor.close()
            return
        while (done := self._take_polled(waits=True)) is not None:
            self._deliver(done)
        if self._is_started:
            for thread in self._threads:
                thread.join()
            self._executor.close()

    def _order(self, change: _Change) -> None:
        """Launch a change behind what was submitted, at once if the device has all of that."""
        if not (self._executor.is_asynchronous and self._may_launch()):
            self._put(change)
            return
        self._apply(change)
        self._take_turn(finished=1)

    def _put(self, task: _Submitted | _Change | _Prepare) -> None:
        with self._lock:
            self._begin()
            self._queued += 1
            self._tasks.put(task)

    def _may_launch(self) -> bool:
        """Whether the device has all that was submitted, so that the caller may launch a batch; it is counted then."""
        with self._lock:
            if self._queued:
                return False
            self._begin()
            return True

    def _take_polled(self, waits: bool = False) -> _Submitted | None:
        """The first batch that waits to be polled, if it is done or the caller waits for it; None if there is none."""
        with self._lock:
            if not self._polled or not (waits or self._polled[0].is_done()):
                return None
            self._turn = time.monotonic()
            self._unfinished -= 1  # before on_done, which may launch the next one
            return self._polled.popleft()

    def _begin(self) -> None:
        """Count a task, with the lock held."""
        if self._is_closed:
            raise RuntimeError("engine: expected an open engine, got a closed one")
        if self._unfinished == 0:
            self._turn = time.monotonic()
        self._unfinished += 1

    def _serve(self) -> None:
        """The device thread."""
        with torch.inference_mode(), self._on_device():
            while (task := self._tasks.get()) is not None:
                self._take_turn()
                self._take_turn(finished=self._do(task), dequeued=1)
                del task  # nothing of it is held while the thread waits: its arrays may lie in memory to be unmapped
        self._launched.put(None)

    def _do(self, task: _Submitted | _Change | _Prepare) -> bool:
        """Do a task; whether it is finished, and not only launched."""
        if isinstance(task, _Submitted):
            self._launch(task)
            if self._executor.is_asynchronous:
                self._launched.put(task)
                return False
            self._deliver(task)
        elif isinstance(task, _Change):
            self._apply(task)
        else:
            self._prepare(task)
        return True

    def _collect(self) -> None:
        """The thread that waits for results."""
        with torch.inference_mode(), self._on_device():
            while (launched := self._launched.get()) is not None:
                self._deliver(launched)
                self._take_turn(finished=1)
                del launched

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the device the thread's current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _take_turn(self, finished: int = 0, dequeued: int = 0) -> None:
        with self._lock:
            self._turn = time.monotonic()
            self._unfinished -= finished
            self._queued -= dequeued

    def _launch(self, submitted: _Submitted) -> None:
        batch = submitted.batch
        if not self._has_failed:
            try:
                submitted.launched = self._executor.launch(batch)
                return
            except Exception:
                self._batch_failed(batch)
        submitted.launched = Launched(lambda: True, lambda: _failure(batch, self.failed()))

    def _deliver(self, submitted: _Submitted) -> None:
        assert submitted.launched is not None
        try:
            result = submitted.launched.result()
        except Exception:
            self._batch_failed(submitted.batch)
            result = _failure(submitted.batch, self.failed())
        try:
            submitted.on_done(result)
        except Exception:
            logger.exception("the receiver of a batch's result failed")

    def _batch_failed(self, batch: StepBatch) -> None:
        """Log the error that is being handled, and tell whether the device is lost by it."""
        logger.exception("a batch of %d rows failed", batch.control.shape[1] - 1)
        if self._executor.is_lost():
            logger.error("the device is lost; the engine stops computing")
            self._has_failed = True

    def _apply(self, change: _Change) -> None:
        try:
            change.apply()
        except Exception:
            # Lines may hold the state of their last owner, or lack pages: nothing may read them any more.
            logger.exception("%s failed; the engine stops computing", change.what)
            self._has_failed = True

    def _prepare(self, task: _Prepare) -> None:
        try:
            self._executor.prepare(task.report)
        except Exception as error:
            task.done.set_exception(error)
        else:
            task.done.set_result(None)


def _failure(batch: StepBatch, is_lost: bool) -> BatchResult:
    """The result of a batch that could not be computed."""
    hidden = np.empty((0, batch.hidden[0].shape[1]), dtype=batch.hidden[0].dtype)
    unsound = np.zeros(batch.control.shape[1] - 1, dtype=np.bool_)
    return BatchResult(hidden, unsound, failed=True, is_lost=is_lost)


def _pass_on(ended: Future[None], done: Future[None]) -> None:
    """Tell one future what became of another."""
    error = ended.exception()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
