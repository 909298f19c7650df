"""Loads adapters beside serving: reads and converts them in a thread, and registers them on the event loop.

One at a time, so that a name is not loaded twice at once and the memory of a load stays one adapter's; owners have
turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

from torch import Tensor

from deltaline_server.adapters.directory import TENSORS_FILE
from deltaline_server.adapters.files import AdapterPlan, BaseRows
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.tensor_file import Bytes, MemoryBytes, TensorFile
from deltaline_server.errors import Reason, RequestError
from deltaline_server.log import event
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_weights import Adapter
from deltaline_server.principal import SHARED, FairLock, Principal
from deltaline_server.tables.adapter_registry import AdapterDescription, AdapterRegistry

_log = logging.getLogger(__name__)

Files = Callable[[], AbstractContextManager[tuple[bytes, Bytes]]]


class AdapterLoader:
    """Loads into a registry. Its methods belong to the event loop's thread."""

    def __init__(
        self,
        *,
        registry: AdapterRegistry,
        layout: AdapterLayout,
        root: AdapterRoot | None,
        open_base: Callable[[int], AbstractContextManager[BaseRows]],
        allocate: Callable[[int], Tensor],
        max_rank: int,
    ) -> None:
        """root: None where clients may only upload. open_base: opens a rank's share of the weights that DoRA has norms
        of. allocate: host memory, uint8; called in a thread, may raise MemoryError or RuntimeError when there is
        none."""
        self._registry, self._layouts, self._root = registry, layout.of_all_ranks(), root
        self._open_base, self._allocate, self._max_rank = open_base, allocate, max_rank
        self._lock = FairLock()

    async def load_directory(self, name: str, is_pinned: bool, owner: Principal) -> tuple[AdapterDescription, bool]:
        """Load the directory `name` of the root for its owner; returns what there is now, and whether it was there
        before.

        Raises RequestError: ADAPTERS_OFF without a root; else as `load_bytes`.
        """
        root = self._root
        if root is None:
            upload = "upload the files (`deltaline adapters load NAME --from DIR`)"
            message = f"this server has no folder of adapters: {upload}, or start it with --adapter-root"
            raise RequestError(Reason.ADAPTERS_OFF, message, field="upload")
        return await self._load(name, is_pinned, owner, lambda: root.open(name), "name")

    async def load_bytes(
        self, name: str, is_pinned: bool, owner: Principal, config: bytes, tensors: bytearray
    ) -> tuple[AdapterDescription, bool]:
        """Load the two files of an adapter; as `load_directory`.

        Raises RequestError: INVALID_ADAPTER, ADAPTER_EXISTS, ADAPTER_BYTES_EXHAUSTED; then nothing has changed.
        """

        @contextmanager
        def files() -> Iterator[tuple[bytes, Bytes]]:
            yield config, MemoryBytes(tensors, TENSORS_FILE)

        return await self._load(name, is_pinned, owner, files, "upload")

    async def close(self) -> None:
        """Wait for the load that has begun, if any. Those that wait behind it have to be cancelled before."""
        async with self._lock.turn(SHARED.number):
            pass

    async def _load(
        self, name: str, is_pinned: bool, owner: Principal, files: Files, field: str
    ) -> tuple[AdapterDescription, bool]:
        """Load, one at a time. A caller that is cancelled while it waits for its turn loads nothing.

        A load that has begun is finished, and only then does this return: an upload's bytes are in memory until then.
        """
        async with self._lock.turn(owner.number):
            loading = asyncio.create_task(self._load_once(name, is_pinned, owner, files, field))
            is_cancelled = False
            while not loading.done():
                try:
                    await asyncio.wait([loading])
                except asyncio.CancelledError:
                    is_cancelled = True
            if is_cancelled and not loading.cancelled():
                loading.exception()  # nobody waits for it any more
                raise asyncio.CancelledError
            return await loading

    async def _load_once(
        self, name: str, is_pinned: bool, owner: Principal, files: Files, field: str
    ) -> tuple[AdapterDescription, bool]:
        registry, begin_s = self._registry, time.monotonic()
        with ExitStack() as stack:
            try:
                plans = await asyncio.to_thread(self._plan, stack, files)
                num_bytes = sum(plan.num_bytes for plan in plans)
                if registry.known_hash(name, owner) is not None:
                    content_hash = await asyncio.to_thread(plans[0].content_hash)
                    if registry.known_hash(name, owner) is not None:  # it was not unloaded meanwhile
                        return registry.confirm(name, content_hash, is_pinned, owner), True
                registry.reserve(num_bytes, owner)
                try:
                    adapter = await asyncio.to_thread(self._read, plans)
                except BaseException:
                    registry.unreserve(num_bytes)
                    raise
            except ModelError as error:
                raise RequestError(Reason.INVALID_ADAPTER, str(error), field=field) from error
        description = registry.register(name, adapter, is_pinned, owner)
        seconds = time.monotonic() - begin_s
        registry.load_s += seconds
        event(
            _log,
            "adapter loaded",
            content=description.content_hash.hex()[:16],
            rank=description.rank,
            size_bytes=description.num_bytes,
            seconds=seconds,
        )
        return description, False

    def _plan(self, stack: ExitStack, files: Files) -> list[AdapterPlan]:
        """Open the files, which stay open with the stack, and check them for each rank. Raises ModelError."""
        content, tensors = stack.enter_context(files())
        config, file = AdapterConfig.parse(content, self._max_rank), TensorFile(tensors)
        return [AdapterPlan(config, file, layout) for layout in self._layouts]

    def _read(self, plans: Sequence[AdapterPlan]) -> Adapter:
        """Read and convert the tensors. Raises ModelError; RequestError ADAPTER_BYTES_EXHAUSTED; RuntimeError if the
        base weights can't be read, which is no fault of the adapter's."""
        first, *others = (self._read_share(rank, plan) for rank, plan in enumerate(plans))
        return replace(first, shares=tuple(others))

    def _read_share(self, rank: int, plan: AdapterPlan) -> Adapter:
        """The same, of one rank."""
        if not plan.needs_base:
            return plan.load(None, self._allocate_or_refuse)
        with ExitStack() as stack:
            try:
                base = stack.enter_context(self._open_base(rank))
            except ModelError as error:
                raise RuntimeError("the model's weights can't be read any more") from error
            return plan.load(base, self._allocate_or_refuse)

    def _allocate_or_refuse(self, num_bytes: int) -> Tensor:
        try:
            return self._allocate(num_bytes)
        except (MemoryError, RuntimeError) as error:
            _log.warning("%d bytes for an adapter can't be had: %s", num_bytes, str(error))
            raise RequestError(Reason.ADAPTER_BYTES_EXHAUSTED, "the host has no such memory to give") from error
