"""Computing one batch: what the device thread asks of a device, and how the CPU does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_kernels.rows import NUM_FIELDS
from deltaline_server.batch import BatchResult, StepBatch, sound_rows
from deltaline_server.engine.batch_layout import fill_waypoints, num_waypoints
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.models.model import Model
from deltaline_server.tables.pages import PagesPlaced

Report = Callable[[int, int], None]


class Launched(NamedTuple):
    """A batch that a device computes. is_done tells whether it is over; result waits until then, and is called once."""

    is_done: Callable[[], bool]
    result: Callable[[], BatchResult]


@dataclass(frozen=True)
class DeviceCounts:
    """What must not grow while batches are served: kernels compiled or loaded, graphs captured, allocations of device
    memory, and its bytes."""

    compilations: int = 0
    captures: int = 0
    allocations: int = 0
    bytes: int = 0


class Executor(Protocol):
    """A device that computes batches in the order in which they are launched. One thread launches."""

    is_asynchronous: bool
    """Whether `launch` returns before the batch is computed, so that another thread may wait for it."""

    is_gone: bool
    """Whether it is known, with nothing asked, that the device answers no more."""

    def prepare(self, report: Report) -> None:
        """Compile and allocate all that batches need, before the first one; `report` gets what is done, of how much."""

    def launch(self, batch: StepBatch) -> Launched:
        """Begin to compute a batch."""

    def zero(self, lines: NDArray[np.int64]) -> None:
        """Zero lines after the batches launched before, without waiting for these if it is asynchronous. Raises as
        StatePool.zero does."""

    def place_pages(self, placed: PagesPlaced) -> None:
        """Write rows of the table of pages and copy pages, likewise.

        Raises IndexError if a line is none, and as StatePool.place_rows does."""

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        """Let work copy between the device's memory and the host's, after the batches launched before and beside those
        after; it says what by torch. The future is done when the device has done it, or has what failed."""

    def is_lost(self) -> bool:
        """Tell, after an error, whether the device answers no more."""

    def close(self) -> None:
        """End its threads. Nothing is launched afterwards."""

    def counts(self) -> DeviceCounts:
        """Tell what was compiled, captured and allocated so far. May be called from any thread."""


class CpuExecutor:
    """The host's arrays as tensors and back, without copies (an array that can't be written is copied)."""

    is_asynchronous = is_gone = False

    def __init__(self, model: Model, pool: StatePool) -> None:
        self._model, self._pool = model, pool

    def prepare(self, report: Report) -> None:
        """Compute a decode and a prefill on every span: nothing is compiled for the CPU, but a fault shows."""
        for span in range(len(self._model.spans)):
            trial = trial_batch(self._model, self._pool, span, [1, self._pool.max_draft + 1])
            self._compute(trial)
            if self._model.adapters is not None:
                self._compute(replace(trial, adapter_places=np.array([-1, 0], dtype=np.int32)))

    def launch(self, batch: StepBatch) -> Launched:
        result = self._compute(batch)
        return Launched(lambda: True, lambda: result)

    def zero(self, lines: NDArray[np.int64]) -> None:
        self._pool.zero(lines)

    def place_pages(self, placed: PagesPlaced) -> None:
        self._pool.check_lines(placed.lines)
        self._pool.place_rows(torch.from_numpy(placed.lines), torch.from_numpy(placed.pages))
        self._pool.copy_pages(torch.from_numpy(placed.copies))

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def counts(self) -> DeviceCounts:
        return DeviceCounts()

    def _compute(self, batch: StepBatch) -> BatchResult:
        model = self._model
        begin_s = time.perf_counter()
        control = _as_tensor(batch.control)
        hidden = self._hidden_of(batch)
        wanted = None if batch.wanted is None else _as_tensor(batch.wanted)
        adapter_places = None if batch.adapter_places is None else _as_tensor(batch.adapter_places)
        new_pages = None if batch.new_pages is None else _as_tensor(batch.new_pages)
        waypoints = None
        if batch.waypoints is not None:
            table = np.empty(num_waypoints(batch.num_tokens, batch.control.shape[1] - 1), dtype=np.int32)
            fill_waypoints(table, batch, batch.num_short)
            waypoints = torch.from_numpy(table)
        copied_s = time.perf_counter()
        longest = int(np.diff(batch.control[0]).max(initial=0))
        rows = Rows(control, batch.num_short, self._pool.max_draft, longest, waypoints=waypoints)
        output = model.forward(batch.span, hidden, rows, self._pool, adapter_places, new_pages)
        returned = output if wanted is None else output.index_select(0, wanted)
        sizes = token_sizes(output).numpy()
        computed_s = time.perf_counter()
        integer_type = torch.int32 if model.dtype.itemsize == torch.int32.itemsize else torch.int16
        array = returned.view(integer_type).numpy().view(model.numpy_dtype)
        finite = sound_rows(batch.control[0], sizes)
        return BatchResult(array, finite, copied_s - begin_s, computed_s - copied_s, time.perf_counter() - computed_s)

    def _hidden_of(self, batch: StepBatch) -> Tensor:
        """The hidden states of a batch; room for them where rank 0 has them."""
        model, pieces = self._model, batch.hidden
        if not pieces:
            return torch.empty(batch.num_tokens, model.ends[batch.span].input_width, dtype=model.dtype)
        # torch takes no bfloat16 from numpy: both sides see integers of the same size.
        integers = (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(f"i{model.dtype.itemsize}")
        return _as_tensor(integers).view(model.dtype)


def trial_batch(model: Model, pool: StatePool, span: int, lengths: Sequence[int]) -> StepBatch:
    """Make a batch of rows of these lengths, short ones first, that read the null line and write none."""
    control = np.zeros((NUM_FIELDS, len(lengths) + 1), dtype=np.int32)
    control[0, 1:] = np.cumsum(lengths)
    control[2] = -1
    control[3, :-1] = lengths
    hidden = np.full((sum(lengths), model.ends[span].input_width), 0.5, model.numpy_dtype)
    num_short = next((i for i, n in enumerate(lengths) if n > pool.max_draft), len(lengths))
    return StepBatch(span, control, num_short, (hidden,), None)


def token_sizes(output: Tensor) -> Tensor:
    """Return the largest absolute value of each token of `[T, width]`, fp32 `[T]`: NaN or inf if any value is."""
    # Of the functions that tell, the fastest on the CPU, by six times; both propagate NaN.
    return output.abs().amax(dim=-1).float()


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """The array as a tensor that shares its memory; torch would warn about an array that can't be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
