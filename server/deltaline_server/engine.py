"""The engine: owns the device thread and computes batches on it, one after another.

Knows the model, its state and control tensors. Knows no RPC, no sequence, no queue limits (scheduler.py).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.model import Model
from deltaline_server.staging import make_staging
from deltaline_server.state_pool import StatePool
from deltaline_server.step import BatchResult, StepBatch

logger = logging.getLogger(__name__)

OnDone = Callable[[BatchResult], None]


@dataclass(frozen=True)
class _Run:
    batch: StepBatch
    on_done: OnDone


@dataclass(frozen=True)
class _Zero:
    lines: NDArray[np.int64]


class Engine:
    """Owns the device thread: batches and zeroing run on it in the order in which they were submitted.

    `submit` and `zero_lines` return at once and may be called from any thread.
    """

    def __init__(self, model: Model, pool: StatePool) -> None:
        self._model = model
        self._pool = pool
        self._jobs: queue.SimpleQueue[_Run | _Zero | None] = queue.SimpleQueue()
        self._staging = make_staging(model.dtype, model.numpy_dtype, model.device)
        self._thread = threading.Thread(target=self._serve, name="device", daemon=False)
        self._lock = threading.Lock()
        self._unfinished = 0
        self._turn = time.monotonic()
        self._closed = False
        self._failed = False
        self._precision = ""

    def start(self) -> None:
        """Start the device thread. fp32 products are full fp32 (no TF32) in this process until `close`."""
        self._precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        self._thread.start()

    def submit(self, batch: StepBatch, on_done: OnDone) -> None:
        """Compute a batch. `on_done` is called on the device thread, once, also when the computation fails.

        The batch's arrays must stay as they are until then. Raises RuntimeError after `close`.
        """
        self._put(_Run(batch, on_done))

    def zero_lines(self, lines: NDArray[np.int64]) -> None:
        """Zero every tensor of these lines in every layer, after the batches submitted before and before those after.

        An engine that could not do it computes nothing more: `failed` is True. Raises RuntimeError after `close`.
        """
        self._put(_Zero(lines.copy()))

    def heartbeat_s(self) -> float:
        """Seconds since the device thread last began or ended a job while it has work; 0.0 when idle."""
        with self._lock:
            return time.monotonic() - self._turn if self._unfinished else 0.0

    def failed(self) -> bool:
        """Whether the device is lost, so that every later batch fails too."""
        return self._failed

    def close(self) -> None:
        """Finish what was submitted and end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()
            torch.set_float32_matmul_precision(self._precision)

    def _put(self, job: _Run | _Zero) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("engine: expected an open engine, got a closed one")
            if self._unfinished == 0:
                self._turn = time.monotonic()
            self._unfinished += 1
            self._jobs.put(job)

    def _serve(self) -> None:
        """The device thread."""
        device = self._model.device
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), current:
            while (job := self._jobs.get()) is not None:
                with self._lock:
                    self._turn = time.monotonic()
                if isinstance(job, _Run):
                    self._run(job)
                else:
                    self._zero(job.lines)
                with self._lock:
                    self._turn = time.monotonic()
                    self._unfinished -= 1
                del job  # nothing of it is held while the thread waits: its arrays may lie in memory to be unmapped

    def _run(self, job: _Run) -> None:
        result = _failure(job.batch)
        if not self._failed:
            try:
                result = self._compute(job.batch)
            except Exception:
                logger.exception("a batch of %d rows failed", job.batch.control.shape[1] - 1)
                self._failed = self._device_is_lost()
        try:
            job.on_done(result)
        except Exception:
            logger.exception("the receiver of a batch's result failed")

    def _zero(self, lines: NDArray[np.int64]) -> None:
        try:
            self._pool.zero(lines)
        except Exception:
            # The lines may hold the state of their last owner: nothing may read them any more.
            logger.exception("zeroing %d lines failed; the engine stops computing", len(lines))
            self._failed = True

    def _compute(self, batch: StepBatch) -> BatchResult:
        staging = self._staging
        control, hidden, wanted = staging.copy_in(batch)
        output = self._model.forward(batch.span, hidden, self._rows(batch, control), self._pool)
        returned = output if wanted is None else output.index_select(0, wanted)
        # A token's sum is finite only if all of its outputs are: one pass, and [T] values to look at.
        array, sums = staging.copy_out(returned, output.sum(dim=-1, dtype=torch.float32))
        finite = _finite_rows(batch.control[0], np.isfinite(sums), output)
        copy_in_s, compute_s, copy_out_s = staging.times()
        return BatchResult(array, finite, copy_in_s, compute_s, copy_out_s)

    def _rows(self, batch: StepBatch, control: Tensor) -> Rows:
        longest = int(np.diff(batch.control[0]).max(initial=0))
        return Rows(control, batch.num_short, self._pool.max_draft, longest)

    def _device_is_lost(self) -> bool:
        """Tell whether the device still answers after an error."""
        if self._model.device.type == "cpu":
            return False
        try:
            torch.cuda.synchronize(self._model.device)
        except Exception:
            logger.exception("the device is lost; the engine stops computing")
            return True
        return False


def _failure(batch: StepBatch) -> BatchResult:
    """The result of a batch that could not be computed."""
    hidden = np.empty((0, batch.hidden.shape[1]), dtype=batch.hidden.dtype)
    return BatchResult(hidden, np.zeros(batch.control.shape[1] - 1, dtype=np.bool_), failed=True)


def _finite_rows(starts: NDArray[np.int32], sound: NDArray[np.bool_], output: Tensor) -> NDArray[np.bool_]:
    """Tell for each row whether all its outputs are finite.

    starts [N + 1]: the rows' first tokens. sound [T]: False where the sum of a token's outputs is not finite. Such
    a sum may also have overflowed: then the outputs are looked at one by one.
    """
    num_rows = len(starts) - 1
    if sound.all():
        return np.ones(num_rows, dtype=np.bool_)
    sound = torch.isfinite(output).all(dim=-1).cpu().numpy()
    bad = np.concatenate(([0], np.cumsum(~sound)))
    finite: NDArray[np.bool_] = bad[starts[1:]] == bad[starts[:-1]]
    return finite
