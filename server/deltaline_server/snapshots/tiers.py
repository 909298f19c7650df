"""The tiers of one server beside its device: host memory and files, as its configuration asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.memory.mappings import Pinning
from deltaline_server.models.model import NUMPY_DTYPES, Model
from deltaline_server.models.parts import LayerKind
from deltaline_server.principal import Principal
from deltaline_server.ranks.ways import Ranks
from deltaline_server.snapshots.device.shared_transfer import SharedTransfer, ShareTransfer, Told
from deltaline_server.snapshots.device.transfer import StateTransfer
from deltaline_server.snapshots.directory import StateDirectory, StateDirectoryError
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.files import FileTier
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import VERSION, Part, StateLayer, StateLayout
from deltaline_server.snapshots.moves import Begin, Moves
from deltaline_server.snapshots.sequences.whole import WholeSequences
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.pages import PagesPlaced
from deltaline_server.tables.sequence_adapters import SequenceAdapters
from deltaline_server.tables.sequences import SequenceTable

Shared = tuple[Ranks, Callable[[Told], None]]
"""A way for states' bytes, and what tells the other ranks to copy."""


@dataclass(frozen=True)
class Tiers:
    """What every state of this server looks like, and where it may lie. host, files and their folder: None where they
    are off."""

    layout: StateLayout
    fingerprint: bytes
    host: HostTier | None
    files: FileTier | None
    directory: StateDirectory | None

    @classmethod
    def open(cls, config: Config, model: Model, pool: StatePool, pinning: Pinning | None) -> Tiers:
        """Take host memory, and the folder of files: milliseconds per 100 MB. Nothing is looked for yet.

        Raises ModelError: the folder can't be used, or there is not so much memory.
        """
        layout, fingerprint = make_layout(model, pool), model.fingerprint(pool.state_dtype, VERSION)
        host = files = directory = None
        try:
            if config.host_state_bytes:
                host = HostTier(layout, config.host_state_bytes, pinning)
            if config.state_dir is not None:
                directory = StateDirectory(Path(config.state_dir))
                files = FileTier(directory, layout, fingerprint, config.state_dir_bytes)
        except (StateDirectoryError, MemoryError) as error:
            if host is not None:
                host.close()
            raise ModelError(str(error)) from error
        return cls(layout, fingerprint, host, files, directory)

    @property
    def by_name(self) -> dict[str, HostTier | FileTier]:
        """Those that there are."""
        named = {"host": self.host, "file": self.files}
        return {name: tier for name, tier in named.items() if tier is not None}

    def moves(
        self,
        model: Model,
        pool: StatePool,
        begin: Begin,
        snapshots: SnapshotTable,
        capture: Capture,
        adapters: SequenceAdapters,
        shared: Shared | None = None,
    ) -> Moves | None:
        """What moves the snapshots of a table between the tiers from now on, None where there are none; allocates its
        memory on the device. begin: as Engine.transfer. shared: of a server over ranks."""
        if self.host is None:
            return None
        snapshots.lower = moves = Moves(
            host=self.host,
            files=self.files,
            fingerprint=self.fingerprint,
            transfer=self._transfer(model, pool, shared),
            begin=begin,
            snapshots=snapshots,
            capture=capture,
            adapters=adapters,
        )
        return moves

    def _transfer(self, model: Model, pool: StatePool, shared: Shared | None) -> StateTransfer | SharedTransfer:
        if shared is None:
            return StateTransfer(self.layout, layer_numbers(model), pool)
        way, tell = shared
        return SharedTransfer(self.layout, make_share(model, pool, way), way, tell)

    def exchange(
        self, model: Model, pool: StatePool, moves: Moves | None, snapshots: SnapshotTable, adapters: SequenceAdapters
    ) -> Exchange | None:
        """What gives and takes the snapshots of a table as states' files, None where there is no host memory."""
        if self.host is None or moves is None:
            return None
        of_model = (
            Part.CONV_Q,
            Part.CONV_K,
            Part.CONV_V,
            Part.CONV_X,
            Part.CONV_B,
            Part.CONV_C,
            Part.KEYS,
            Part.VALUES,
        )
        drafts = Part.DRAFT_KEYS, Part.DRAFT_UPDATES, Part.DRAFT_GATES
        types = dict.fromkeys(of_model, model.numpy_dtype) | dict.fromkeys(drafts, np.dtype(np.float32))
        return Exchange(
            layout=self.layout,
            fingerprint=self.fingerprint,
            types=types | {Part.RECURRENT: NUMPY_DTYPES[pool.state_dtype]},
            host=self.host,
            moves=moves,
            snapshots=snapshots,
            adapters=adapters,
        )

    def wholes(
        self,
        model: Model,
        moves: Moves | None,
        table: SequenceTable,
        place_pages: Callable[[PagesPlaced], None],
        reserve_replies: Callable[[Principal, int], None],
    ) -> WholeSequences | None:
        """What takes sequences of a table into host memory and opens others, None where there is none."""
        if self.host is None or moves is None:
            return None
        return WholeSequences(
            layout=self.layout,
            fingerprint=self.fingerprint,
            host=self.host,
            moves=moves,
            table=table,
            place_pages=place_pages,
            reserve_replies=reserve_replies,
            ends=model.ends,
            dtype=model.numpy_dtype,
        )

    async def close(self) -> None:
        """Finish writes and reads, and give back folder and memory. Idempotent."""
        if self.files is not None:
            await self.files.close()
        if self.host is not None:
            self.host.close()


def make_share(model: Model, pool: StatePool, way: Ranks) -> ShareTransfer:
    """What gathers and scatters a rank's share of states; way: as ShareTransfer has it."""
    return ShareTransfer(make_layout(model, pool), model, layer_numbers(model), pool, way)


def make_layout(model: Model, pool: StatePool) -> StateLayout:
    """The layout of the states of a model, over all ranks, in a server with such a pool."""
    layers = [
        StateLayer(number, span, model.config.shapes[mixer])
        for span, numbers in enumerate(model.spans)
        for number in numbers
        for mixer in LayerKind(model.config.layers[number].mixer).mixers
    ]
    return StateLayout(
        tuple(sorted(layers, key=lambda layer: layer.number)),
        num_spans=len(model.spans),
        itemsize=model.dtype.itemsize,
        state_itemsize=pool.state_dtype.itemsize,
        max_draft=pool.max_draft,
        max_tokens=0 if pool.kv is None else pool.kv.max_context,
    )


def layer_numbers(model: Model) -> list[int]:
    """The layer's number of each state of a model's pool, in the order in which that has them."""
    layers = model.config.layers
    return [number for number in sorted(itertools.chain(*model.spans)) for _ in LayerKind(layers[number].mixer).mixers]
