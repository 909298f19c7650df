"""What configs say of short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_CONV_WIDTH, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.shapes import ShortConvShape
from deltaline_server.models.parts import MAX_SIZE


@dataclass(frozen=True)
class ShortConvKeys:
    """Short convolutions, which have as many channels as hidden states."""

    def read(self, config: ConfigReader) -> ShortConvShape:
        """Read their sizes. Raises ModelError naming the key."""
        return ShortConvShape.of(
            config.integer("hidden_size", 1, MAX_SIZE),
            config.integer("conv_L_cache", MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=3),
            has_bias=config.flag("conv_bias", default=False),
        )
