"""What a config says of blocks that several layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from deltaline_server.checkpoints.checkpoint import TensorSource
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.checkpoints.shared_blocks import SharedBlocks
from deltaline_server.models.parts import MAX_HEADS, MAX_LAYERS, LayerConfig, MixerKind


@dataclass(frozen=True)
class SharedBlockKeys:
    """count: blocks, which the layers that use one have in turn. attention_adapters: whether each use has low-rank
    matrices of queries, keys and values, beside those of the MLP."""

    count: int
    attention_adapters: bool

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        """Raises ModelError naming the key."""
        count = config.integer("num_mem_blocks", 1, MAX_LAYERS, default=1)
        adapters = config.flag("use_shared_attention_adapter", default=False)
        heads = config.integer("num_attention_heads", 1, MAX_HEADS, default=32)
        if adapters and config.get("num_key_value_heads") not in (None, heads):
            raise config.fail("num_key_value_heads", f"{heads}, as attention has adapters of as many")
        return cls(count, adapters)

    def of(self, source: TensorSource, layers: Sequence[LayerConfig]) -> SharedBlocks:
        """The source of a checkpoint's tensors with what each layer makes of its block."""
        users = [layer.index for layer in layers if layer.mixer is MixerKind.MAMBA2_BEHIND_ATTENTION]
        return SharedBlocks(source, users, self.count, attention_adapters=self.attention_adapters)
