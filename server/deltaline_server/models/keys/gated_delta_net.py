"""What configs say of Gated DeltaNet mixers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.mixers.gated_delta_net import DeltaLayout
from deltaline_server.layers.shapes import GatedDeltaNetShape
from deltaline_server.models.parts import MAX_HEADS, MAX_SIZE


@dataclass(frozen=True)
class GatedDeltaNetKeys:
    """Gated DeltaNet mixers. layout: how they are stored. eps: of their norm, None for that of the other norms.
    doubles_updates: the key that says so, True where it is absent; None where none are doubled. derives_sizes: whether
    sizes that a config does not say follow from its attention heads."""

    layout: DeltaLayout = DeltaLayout.TOGETHER
    eps: float | None = None
    doubles_updates: str | None = None
    derives_sizes: bool = False

    def read(self, config: ConfigReader) -> GatedDeltaNetShape:
        """Read their sizes. Raises ModelError naming the key."""
        key_heads = self._integer(config, "linear_num_key_heads", MAX_HEADS, 16, lambda: _heads(config))
        value_heads = self._integer(config, "linear_num_value_heads", MAX_HEADS, 32, lambda: _heads(config))
        hidden = config.integer("hidden_size", 1, MAX_SIZE)
        key_dim = self._integer(
            config, "linear_key_head_dim", MAX_HEAD_DIM, 128, lambda: int(0.75 * hidden / key_heads)
        )
        shape = GatedDeltaNetShape(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=key_dim,
            value_dim=self._integer(config, "linear_value_head_dim", MAX_HEAD_DIM, 128, lambda: 2 * key_dim),
            conv_width=config.integer("linear_conv_kernel_dim", MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=4),
            doubles_updates=self.doubles_updates is not None and config.flag(self.doubles_updates, default=True),
        )
        if shape.num_value_heads % shape.num_key_heads:
            raise config.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.num_key_heads})")
        return shape

    def _integer(self, config: ConfigReader, key: str, most: int, usual: int, derived: Callable[[], int]) -> int:
        """A size; where the config does not say it the usual one, or a derived one."""
        if not self.derives_sizes or config.get(key) is not None:
            return config.integer(key, 1, most, default=usual)
        if not 1 <= (size := derived()) <= most:
            raise config.fail(key, f"an integer in 1..{most}, not the {size} that follows from attention's heads")
        return size


def _heads(config: ConfigReader) -> int:
    return config.integer("num_attention_heads", 1, MAX_HEADS)
