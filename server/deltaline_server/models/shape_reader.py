"""Sizes of mixers, as configs say them: read as transformers reads them.

Knows keys; not which layers there are (config.py).
"""

from __future__ import annotations

import math

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import MAX_FLOAT, Keys
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape

MAX_HEADS = 4096
MAX_POSITIONS = 1 << 24
# What may stand beside the rope type. The sections are those of three-dimensional positions (mrope): of text, all three
# positions are the token's, and rotate as one does.
ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def gated_delta_net_shape(keys: Keys) -> GatedDeltaNetShape:
    """Read the sizes of Gated DeltaNet mixers. Raises ModelError naming the key."""
    shape = GatedDeltaNetShape(
        num_key_heads=keys.integer("linear_num_key_heads", 1, MAX_HEADS),
        num_value_heads=keys.integer("linear_num_value_heads", 1, MAX_HEADS),
        key_dim=keys.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=keys.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv_width=keys.integer("linear_conv_kernel_dim", MIN_CONV_WIDTH, MAX_CONV_WIDTH),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise keys.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.num_key_heads})")
    return shape


def attention_shape(keys: Keys, num_kv_heads: int) -> AttentionShape:
    """Read the sizes of gated attention mixers. num_kv_heads: where the config says nothing.

    Raises ModelError naming the key, also of a kind of rotary embedding that is not served.
    """
    heads = keys.integer("num_attention_heads", 1, MAX_HEADS, default=16)
    kv_heads = keys.integer("num_key_value_heads", 1, MAX_HEADS, default=num_kv_heads)
    if heads % kv_heads:
        raise keys.fail("num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})")
    head_dim = keys.integer("head_dim", 1, MAX_HEAD_DIM, default=256)
    rotary_dim, theta = _rotary(keys, head_dim)
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        max_positions=keys.integer("max_position_embeddings", 1, MAX_POSITIONS, default=32768),
        has_bias=keys.flag("attention_bias", default=False),
    )


def _rotary(keys: Keys, head_dim: int) -> tuple[int, float]:
    """Channels that are rotated, and the base of their wavelengths.

    As `rope_scaling` says, else `rope_parameters`, else the config itself.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.nested(name) if keys.get(name) else Keys({}, "")
    kind = "rope_type" if rope.get("rope_type") is not None else "type"
    rope.require(kind, "default", default="default")
    rope.only(ROPE_KEYS)
    theta = rope if rope.get("rope_theta") is not None else keys
    factor = rope if rope.get("partial_rotary_factor") is not None else keys
    share = factor.positive("partial_rotary_factor", default=0.25)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise factor.fail("partial_rotary_factor", f"an even number of rotated channels in 2..{head_dim}")
    return rotary_dim, theta.positive("rope_theta", default=10000.0)


def value_groups(keys: Keys, num_heads: int, key: str = "n_groups") -> int:
    """Read the groups of Mamba2 heads that share B and C. Raises ModelError naming the key."""
    groups = keys.integer(key, 1, MAX_HEADS, default=8)
    if num_heads % groups:
        raise keys.fail(key, f"a divisor of {num_heads} heads")
    return groups


def time_step_limits(keys: Keys) -> tuple[float, float]:
    """Read the least and the greatest time step of Mamba2. Raises ModelError naming the key.

    JSON has no infinity: it is written in an object, or as Python does.
    """
    limits = keys.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise keys.fail("time_step_limit", "two numbers")
    least, greatest = (math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits)
    if not all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in (least, greatest)):
        raise keys.fail("time_step_limit", "two numbers")
    if not (0 <= least <= MAX_FLOAT and least <= greatest and (greatest <= MAX_FLOAT or greatest == math.inf)):
        raise keys.fail("time_step_limit", "0 <= least <= greatest, numbers that fp32 holds or infinity")
    return float(least), float(greatest)
