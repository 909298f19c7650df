"""What configs call the sizes of dense MLPs, where a key alone does not say it."""

from __future__ import annotations

from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.models.parts import MAX_SIZE


def adjusted_size(config: ConfigReader) -> int:
    """The size of the MLPs of LFM2: `block_ff_dim`, or `intermediate_size`, two thirds of it where it is adjusted, times
    `block_ffn_dim_multiplier`, up to a multiple of `block_multiple_of`, as Lfm2MLP of transformers computes it."""
    key = config.spelling("block_ff_dim", "intermediate_size")
    inner = config.integer(key, 1, MAX_SIZE, default=12288)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    if not (config.says("block_ffn_dim_multiplier") and config.get("block_ffn_dim_multiplier") is None):
        inner = int(config.positive("block_ffn_dim_multiplier", default=1.0) * inner)
        multiple = config.integer("block_multiple_of", 1, MAX_SIZE, default=256)
        inner = -(-inner // multiple) * multiple
    if not 1 <= inner <= MAX_SIZE:
        raise config.fail(key, f"MLPs of 1..{MAX_SIZE} channels once adjusted (block_auto_adjust_ff_dim), not {inner}")
    return inner
