"""What keeps the adapters of a server, put together from its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from deltaline_server.adapters.copier import AdapterCopier, CallSoon
from deltaline_server.adapters.loader import AdapterLoader
from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.adapters.shared_store import SharedStore, Store
from deltaline_server.config import Config
from deltaline_server.memory.pinning import CudaPinning, HostMemory
from deltaline_server.models.model import Model, ModelOptions, open_weights
from deltaline_server.ranks.ways import Ranks
from deltaline_server.tables.adapter_places import AdapterPlaces
from deltaline_server.tables.adapter_registry import AdapterRegistry


@dataclass(frozen=True)
class Adapters:
    """The adapters of a server: which there are, which are on the device, and how they come there.

    closing: what is to be closed with them.
    """

    registry: AdapterRegistry
    loader: AdapterLoader
    closing: ExitStack

    @classmethod
    def build(
        cls,
        config: Config,
        model: Model,
        options: ModelOptions,
        clock: Callable[[], float],
        call_soon: CallSoon,
        way: Ranks | None = None,
    ) -> Adapters | None:
        """Put them together for a model that was loaded with these options; None where it has no places for adapters.

        clock: monotonic seconds. call_soon: runs calls on the event loop's thread, which alone uses all this. way: to
        the other ranks that have a share of the model, None where there are none.
        Raises ModelError when the folder of adapters can't be opened.
        """
        if model.adapters is None:
            return None
        closing, root = ExitStack(), None
        if config.adapter_root is not None:
            root = AdapterRoot(Path(config.adapter_root))
            closing.callback(root.close)
        memory = HostMemory(CudaPinning(model.device) if model.device.type == "cuda" else None)
        closing.callback(memory.close)
        store: Store = model.adapters
        if way is not None:
            store = shared = SharedStore(model.adapters, way)
            closing.callback(shared.close)
        copier = AdapterCopier(store, call_soon)
        closing.callback(copier.close)
        places = AdapterPlaces(model.adapters.num_places, copier, clock)
        registry = AdapterRegistry(config.adapter_bytes, places)
        loader = AdapterLoader(
            registry=registry,
            layout=model.layout,
            root=root,
            open_base=lambda rank: open_weights(replace(options, rank=rank)),
            allocate=memory.allocate,
            max_rank=config.max_adapter_rank,
        )
        return cls(registry, loader, closing)

    async def close(self) -> None:
        """Finish the load and the copies that have begun, and close the folder; after the last call. Idempotent."""
        await self.loader.close()
        await asyncio.to_thread(self.closing.close)
