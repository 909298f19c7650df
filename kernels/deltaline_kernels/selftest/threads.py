"""Runs parts of the self-test at once, each in a thread with a stream of its own; a kernel that several of them launch
is compiled once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import Any, TypeVar

import torch
from triton import AsyncCompileMode

from deltaline_kernels.selftest.shapes import Part

T = TypeVar("T")

# Parts at a time: most wait for a compiler.
MOST_PARTS = 32


class CompilesOnce(AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode, in which launches wait for what an executor compiles, for several threads."""

    def __init__(self, compilers: ThreadPoolExecutor) -> None:
        super().__init__(compilers)
        self._asking = Lock()

    def submit(self, *kernel: Any) -> Any:
        """Return the kernel that is coming, which is compiled unless one of its key is."""
        with self._asking:
            return super().submit(*kernel)


def run_in_threads(
    run: Callable[[Part, int], T], parts: Sequence[Part], num_compilers: int, device: torch.device
) -> list[T]:
    """Return what `run` makes of each part and its number. Raises what the first that fails raises, once all are over.

    num_compilers: threads that compile, for all parts together. Where two parts want a kernel, one waits for the other.
    """
    with (
        ThreadPoolExecutor(num_compilers, "compiler") as compilers,
        CompilesOnce(compilers),
        ThreadPoolExecutor(MOST_PARTS, "selftest", _use_stream, (device,)) as threads,
    ):
        # The mode is the context's, and each thread's own.
        running = [threads.submit(copy_context().run, run, part, number) for number, part in enumerate(parts)]
        return [one.result() for one in running]


def _use_stream(device: torch.device) -> None:
    """Give the calling thread a stream of its own on a GPU.

    A kernel that begins while the one before it runs knows that one, and would not wait for another thread's.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
