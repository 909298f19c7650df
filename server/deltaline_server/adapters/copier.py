"""Copies adapters from host memory to their places on the device, beside serving: in a thread and a stream of its own.

adapter_places.py never assigns a place that a batch uses, so writing needs no order with the device thread and nothing
waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from deltaline_server.adapters.shared_store import Store
from deltaline_server.models.lora_weights import Adapter
from deltaline_server.tables.adapter_places import Content

_log = logging.getLogger(__name__)

# Runs a call later, on the event loop's thread, from any thread; asyncio's call_soon_threadsafe.
CallSoon = Callable[[Callable[[], None]], object]


@dataclass(frozen=True)
class _Job:
    """What to write to a place: an adapter, or zeros where there is none. done: called with whether it succeeded."""

    place: int
    adapter: Adapter | None = None
    done: Callable[[bool], None] | None = None


class AdapterCopier:
    """A PlaceCopier: writes places in the order in which it was asked to. `close` must follow."""

    def __init__(self, store: Store, call_soon: CallSoon) -> None:
        self._store, self._call_soon = store, call_soon
        # `close` may be called on another thread than the rest.
        self._lock = threading.Lock()
        self._is_closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        if store.device.type == "cuda":
            self._stream = torch.cuda.Stream(store.device)
            # The places were allocated and zeroed there.
            self._stream.wait_stream(torch.cuda.current_stream(store.device))
        # Begins with the first job: a server whose start was broken off has nothing to end.
        self._thread = threading.Thread(target=self._serve, name="adapters", daemon=False)
        self._is_started = False

    def copy(self, place: int, content: Content, done: Callable[[bool], None]) -> None:
        """Begin to copy an adapter; `done` is called later by way of `call_soon`: whether it went well.

        What is begun after `close` goes wrong. Raises TypeError: the content is no Adapter.
        """
        if not isinstance(content, Adapter):
            raise TypeError(f"content: expected an Adapter, got {type(content).__name__}")
        if not self._put(_Job(place, content, done)):
            self._call_soon(partial(done, False))

    def clear(self, place: int) -> None:
        """Overwrite a place with zeros, before anything that is asked for later."""
        self._put(_Job(place))

    def close(self) -> None:
        """Finish what was begun and end the thread. Idempotent; to be called while `call_soon` still takes calls."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        if self._is_started:
            self._thread.join()

    def _put(self, job: _Job) -> bool:
        """Give the thread a job; whether it takes any more."""
        with self._lock:
            if self._is_closed:
                return False
            if not self._is_started:
                self._is_started = True
                self._thread.start()
            self._jobs.put(job)
            return True

    def _serve(self) -> None:
        """The thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._store.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            while (job := self._jobs.get()) is not None:
                self._do(job)
                del job  # no adapter is held while the thread waits

    def _do(self, job: _Job) -> None:
        """Do a job, wait until it is over on the device, and report whether it went well."""
        is_done = True
        try:
            if job.adapter is not None:
                self._store.write(job.place, job.adapter)
            else:
                self._store.clear(job.place)
            if self._stream is not None:
                self._stream.synchronize()
        except Exception:
            _log.exception("writing adapter slot %d failed", job.place)
            is_done = False
        if job.done is not None:
            self._call_soon(partial(job.done, is_done))
