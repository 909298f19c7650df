"""What configs say of Mamba-1 mixers."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.shapes import Mamba1Shape
from deltaline_server.models.parts import MAX_HEADS, MAX_SIZE


@dataclass(frozen=True)
class Mamba1Keys:
    """Mamba-1 mixers: the keys of their sizes.

    channels: the key of their channels, None where these are always `expand` times the hidden size; where a config has
    it, it counts alone. name: what stands before the names of a mixer's tensors. norm_eps: the key of the constant of
    the norms of time steps, B and C, None where there are none; has_norm_weights: whether these have weights.
    """

    state: str
    conv_width: str
    expand: str
    step_rank: str
    conv_bias: str
    bias: str
    channels: str | None = None
    name: str = "mixer."
    norm_eps: str | None = None
    has_norm_weights: bool = False

    def read(self, config: ConfigReader) -> Mamba1Shape:
        """Read their sizes and constants. Raises ModelError naming the key."""
        hidden = config.integer("hidden_size", 1, MAX_SIZE)
        if self.channels is not None and config.get(self.channels) is not None:
            channels = config.integer(self.channels, 1, MAX_SIZE)
        else:
            channels = config.integer(self.expand, 1, MAX_HEADS, default=2) * hidden
            if channels > MAX_SIZE:
                raise config.fail(self.expand, f"at most {MAX_SIZE} channels of {hidden} times it (2 without)")
        rank = -(-hidden // 16)
        if config.get(self.step_rank) not in (None, "auto"):
            rank = config.integer(self.step_rank, 1, MAX_SIZE)
        return Mamba1Shape.of(
            channels,
            config.integer(self.state, 1, MAX_HEAD_DIM, default=16),
            config.integer(self.conv_width, MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=4),
            step_rank=rank,
            norm_eps=0.0 if self.norm_eps is None else config.positive(self.norm_eps, default=1e-6),
            has_norm_weights=self.has_norm_weights,
            has_conv_bias=config.flag(self.conv_bias, default=True),
            has_bias=config.flag(self.bias, default=False),
        )
