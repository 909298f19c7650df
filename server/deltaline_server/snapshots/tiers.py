"""The tiers of one server beside its device: host memory and files, as its configuration asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.memory.mappings import Pinning
from deltaline_server.models.model import Model
from deltaline_server.snapshots.directory import StateDirectory, StateDirectoryError
from deltaline_server.snapshots.files import FileTier
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import VERSION, StateLayer, StateLayout


@dataclass(frozen=True)
class Tiers:
    """What every state of this server looks like, and where it may lie. host, files: None where they are off."""

    layout: StateLayout
    fingerprint: bytes
    host: HostTier | None
    files: FileTier | None

    @classmethod
    def open(cls, config: Config, model: Model, pool: StatePool, pinning: Pinning | None) -> Tiers:
        """Take host memory, and the folder of files: milliseconds per 100 MB. Nothing is looked for yet.

        Raises ModelError: the folder can't be used, or there is not so much memory.
        """
        layout, fingerprint = make_layout(model, pool), model.fingerprint(pool.state_dtype, VERSION)
        host = files = None
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
        return cls(layout, fingerprint, host, files)

    async def find_all(self) -> None:
        """Find what an earlier server left in files. To be called once. Raises ModelError if it can't be read."""
        if self.files is not None:
            try:
                await self.files.find_all()
            except OSError as error:
                raise ModelError(f"--state-dir: expected a folder that can be read ({error.strerror})") from error

    async def close(self) -> None:
        """Finish writes and reads, and give back folder and memory. Idempotent."""
        if self.files is not None:
            await self.files.close()
        if self.host is not None:
            self.host.close()


def make_layout(model: Model, pool: StatePool) -> StateLayout:
    """The layout of the states of a model, over all ranks, in a server with such a pool."""
    shapes = model.config.shapes
    layers = []
    for span, numbers in enumerate(model.spans):
        for number in numbers:
            kind = model.config.layers[number].mixer
            assert kind is not None
            layers.append(StateLayer(number, span, shapes[kind]))
    return StateLayout(
        tuple(sorted(layers, key=lambda layer: layer.number)),
        num_spans=len(model.spans),
        itemsize=model.dtype.itemsize,
        state_itemsize=pool.state_dtype.itemsize,
        max_draft=pool.max_draft,
        max_tokens=0 if pool.kv is None else pool.kv.max_context,
    )


def layer_numbers(model: Model) -> list[int]:
    """The numbers of the layers of a model, in the order in which its pool has them."""
    return [number for numbers in model.spans for number in numbers]
