"""What configs say of KDA mixers."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.shapes import KdaShape
from deltaline_server.models.parts import MAX_HEADS

# The least log decay where a config wants one and does not say which.
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class KdaKeys:
    """KDA mixers, whose sizes a config has under `linear_attn_config`, or in keys that begin with `linear_`.

    num_heads: where a config says nothing. bounds_decays: whether decays may have a lower bound. eps: of the gated
    norm, None for that of the other norms. has_wide_rates: how A_log is stored (KdaFamily).
    """

    num_heads: int
    bounds_decays: bool = False
    eps: float | None = None
    has_wide_rates: bool = False

    def read(self, config: ConfigReader) -> KdaShape:
        """Read their sizes. Raises ModelError naming the key."""
        own = config if config.get("linear_attn_config") is None else config.nested("linear_attn_config")
        num_heads = _integer(config, own, ("linear_num_heads", "num_heads"), 1, MAX_HEADS, self.num_heads)
        head_dim = _integer(config, own, ("linear_head_dim", "head_dim"), 1, MAX_HEAD_DIM, 128)
        widths = MIN_CONV_WIDTH, MAX_CONV_WIDTH
        width = _integer(config, own, ("linear_conv_kernel_dim", "short_conv_kernel_size"), *widths, 4)
        bound = _lower_bound(config, own) if self.bounds_decays else None
        return KdaShape(num_heads, num_heads, head_dim, head_dim, width, bound)


def _integer(config: ConfigReader, own: ConfigReader, keys: tuple[str, str], low: int, high: int, default: int) -> int:
    """Read the second key of what is nested, else the first of the config itself."""
    if own is not config and own.says(keys[1]):
        return own.integer(keys[1], low, high)
    return config.integer(keys[0], low, high, default=default)


def _lower_bound(config: ConfigReader, own: ConfigReader) -> float | None:
    """Read the least log decay, None where decays have none."""
    if own is not config and own.says("gate_lower_bound"):
        bound = own.negative("gate_lower_bound")
    else:
        bound = config.negative("linear_lower_bound") if config.says("linear_lower_bound") else LOWER_BOUND
    if bound is None and own is not config and own.flag("safe_gate", default=True):
        return LOWER_BOUND
    return bound
