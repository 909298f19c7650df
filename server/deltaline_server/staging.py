"""How a batch's arrays reach the device and its outputs come back, with the time that each part took.

On the CPU the arrays are used where they are; on CUDA they go through pinned memory. Knows no model and no state.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_server.step import StepBatch

MIN_PINNED_BYTES = 1 << 20


class Staging(Protocol):
    """Used by one thread, one batch at a time: copy_in, the computation, copy_out, times."""

    def copy_in(self, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return control, hidden and wanted on the device. They are valid until the next copy_in."""

    def copy_out(self, returned: Tensor, sums: Tensor) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return both on the host, when the computation is done; `returned` belongs to the caller."""

    def times(self) -> tuple[float, float, float]:
        """Seconds of copy in, computation and copy out of the last batch."""


def make_staging(dtype: torch.dtype, numpy_dtype: np.dtype[Any], device: torch.device) -> Staging:
    """Make the staging of a device, for hidden states of `dtype` (numpy_dtype on the host)."""
    return CpuStaging(dtype, numpy_dtype) if device.type == "cpu" else CudaStaging(dtype, numpy_dtype, device)


class CpuStaging:
    """The host's arrays as tensors and back, without copies (an array that can't be written is copied)."""

    def __init__(self, dtype: torch.dtype, numpy_dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._numpy_dtype = numpy_dtype
        self._clock = (0.0, 0.0, 0.0, 0.0)

    def copy_in(self, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        begin = time.perf_counter()
        control = _as_tensor(batch.control)
        # torch takes no bfloat16 from numpy: both sides see integers of the same size.
        hidden = _as_tensor(_joined(batch).view(f"i{self._dtype.itemsize}")).view(self._dtype)
        wanted = None if batch.wanted is None else _as_tensor(batch.wanted)
        self._clock = (begin, time.perf_counter(), 0.0, 0.0)
        return control, hidden, wanted

    def copy_out(self, returned: Tensor, sums: Tensor) -> tuple[NDArray[Any], NDArray[np.float32]]:
        computed = time.perf_counter()
        integers = torch.int32 if self._dtype.itemsize == torch.int32.itemsize else torch.int16
        array = returned.view(integers).numpy().view(self._numpy_dtype)
        self._clock = (*self._clock[:2], computed, time.perf_counter())
        return array, sums.numpy()

    def times(self) -> tuple[float, float, float]:
        begin, copied, computed, end = self._clock
        return copied - begin, computed - copied, end - computed


class CudaStaging:
    """Pinned buffers, one for each array that crosses; times by CUDA events (the host's own copies are not in them)."""

    def __init__(self, dtype: torch.dtype, numpy_dtype: np.dtype[Any], device: torch.device) -> None:
        self._dtype = dtype
        self._numpy_dtype = numpy_dtype
        self._device = device
        self._control, self._wanted, self._hidden, self._returned, self._sums = (_PinnedBuffer() for _ in range(5))
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]

    def copy_in(self, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        control = self._control.fill(batch.control, torch.int32)
        hidden = self._hidden.fill(_joined(batch), self._dtype)
        wanted = None if batch.wanted is None else self._wanted.fill(batch.wanted, torch.int64)
        self._events[0].record()
        on_device = (
            control.to(self._device, non_blocking=True),
            hidden.to(self._device, non_blocking=True),
            None if wanted is None else wanted.to(self._device, non_blocking=True),
        )
        self._events[1].record()
        return on_device

    def copy_out(self, returned: Tensor, sums: Tensor) -> tuple[NDArray[Any], NDArray[np.float32]]:
        self._events[2].record()
        returned_tensor, returned_array = self._returned.view(tuple(returned.shape), self._dtype, self._numpy_dtype)
        sums_tensor, sums_array = self._sums.view(tuple(sums.shape), torch.float32, np.dtype(np.float32))
        returned_tensor.copy_(returned, non_blocking=True)
        sums_tensor.copy_(sums, non_blocking=True)
        self._events[3].record()
        self._events[3].synchronize()
        return returned_array.copy(), sums_array

    def times(self) -> tuple[float, float, float]:
        first, second, third = (before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events))
        return first, second, third


class _PinnedBuffer:
    """Pinned host memory that grows to the largest array it has held; a growth costs milliseconds, so it doubles."""

    def __init__(self) -> None:
        self._allocate(MIN_PINNED_BYTES)

    def fill(self, array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        """Copy an array into the buffer; return it as a tensor of `dtype`."""
        tensor, copy = self.view(array.shape, dtype, array.dtype)
        np.copyto(copy, array)
        return tensor

    def view(
        self, shape: tuple[int, ...], dtype: torch.dtype, numpy_dtype: np.dtype[Any]
    ) -> tuple[Tensor, NDArray[Any]]:
        """Return the first bytes of the buffer as a tensor and as an array."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._bytes.numel():
            self._allocate(1 << (size - 1).bit_length())
        return self._bytes[:size].view(dtype).view(shape), self._array[:size].view(numpy_dtype).reshape(shape)

    def _allocate(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._array = self._bytes.numpy()


def _joined(batch: StepBatch) -> NDArray[Any]:
    """The batch's hidden states in one array, copied when there is more than one piece."""
    return batch.hidden[0] if len(batch.hidden) == 1 else np.concatenate(batch.hidden)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """The array as a tensor that shares its memory; torch would warn about an array that can't be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
