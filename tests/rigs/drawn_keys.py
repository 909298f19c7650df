"""Keys of configs drawn at random, by the part of a layer that they tell of."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Raw = dict[str, Any]


def sometimes(rng: random.Random, chance: float = 0.3, **keys: Callable[[], Any]) -> Raw:
    """Some of these keys, each with a value of its own."""
    return {key: value() for key, value in keys.items() if rng.random() < chance}


def flags(rng: random.Random, *keys: str) -> Raw:
    """Some of these switches."""
    return sometimes(rng, 0.5, **{key: lambda: rng.random() < 0.5 for key in keys})


def either(rng: random.Random, first: str, other: str, value: Any, beside: Any) -> Raw:
    """A key under either of its names, or under both: then the first goes before what the other says, `beside`."""
    return rng.choice(({first: value}, {other: value}, {first: value, other: beside}))


def divisor(rng: random.Random, number: int) -> int:
    return rng.choice([one for one in range(1, number + 1) if number % one == 0])


def attention(rng: random.Random, head_dims: tuple[int, ...] = (8, 16, 24, 32, 64), has_dim: bool = True) -> Raw:
    """Sizes of attention."""
    heads = rng.choice((1, 2, 3, 4, 6, 8))
    raw: Raw = {"num_attention_heads": heads, "num_key_value_heads": divisor(rng, heads)}
    raw |= {"max_position_embeddings": rng.choice((50, 64, 200))}
    return raw | ({"head_dim": rng.choice(head_dims)} if has_dim else {})


def even_heads(rng: random.Random, hidden: int) -> Raw:
    """Sizes of attention whose heads share out the hidden size in even parts."""
    raw = attention(rng, has_dim=False)
    heads = rng.choice([one for one in (1, 2, 4, 8) if hidden % (2 * one) == 0])
    return raw | {"num_attention_heads": heads, "num_key_value_heads": rng.choice((None, divisor(rng, heads)))}


def rope(rng: random.Random, share: float | None = None) -> Raw:
    """Rotary embeddings of a kind, in either place. share: of the channels, None where it is not said."""
    first = rng.choice((8, 20, 64))
    kinds: list[Raw] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": rng.choice((2, 1.5, 8.0))},
        {"rope_type": "dynamic", "factor": rng.choice((2.0, 4))},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": rng.choice((0.5, 1)), "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": rng.choice((2.0, 4, 40.0))},
    ]
    kind = rng.choice(kinds)
    if kind["rope_type"] in ("llama3", "yarn"):
        kind |= sometimes(rng, 0.7, original_max_position_embeddings=lambda: first)
    if kind["rope_type"] == "yarn":
        kind |= sometimes(
            rng,
            attention_factor=lambda: rng.choice((0.5, 1.3)),
            beta_fast=lambda: rng.choice((4, 16.0, 32)),
            beta_slow=lambda: rng.choice((0.5, 1, 2)),
            mscale=lambda: rng.choice((0.707, 1, 0)),
            mscale_all_dim=lambda: rng.choice((0.5, 1.0, 0)),
            truncate=lambda: rng.random() < 0.5,
        )
    theta = rng.choice((10.0, 500.0, 10000, 1e6))
    beside = rng.random() < 0.3
    if share is not None and not beside:
        kind["partial_rotary_factor"] = share
    if rng.random() < 0.3:
        kind["type"] = kind.pop("rope_type")
    if rng.random() < 0.3:
        raw: Raw = {"rope_scaling": kind, "rope_parameters": None, "rope_theta": theta}
    elif rng.random() < 0.3:
        raw = {"rope_parameters": kind, "rope_theta": theta}
    else:
        raw = {"rope_parameters": kind | {"rope_theta": theta}}
    if "factor" in kind:
        raw |= sometimes(rng, 0.1, original_max_position_embeddings=lambda: rng.choice((10, 40)))
    return raw | ({"partial_rotary_factor": share} if share is not None and beside else {})


def kinds(rng: random.Random, *names: str, layers: int = 3) -> list[str]:
    """The kinds of layers, each at least once where there is place."""
    drawn = [*rng.sample(names, min(len(names), layers)), *(rng.choice(names) for _ in range(layers - len(names)))]
    return rng.sample(drawn, layers)


def delta(rng: random.Random) -> Raw:
    """Sizes of Gated DeltaNet."""
    heads = rng.choice((1, 2, 3))
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((8, 16, 20, 32)),
        "linear_value_head_dim": rng.choice((8, 16, 20, 32)),
        "linear_conv_kernel_dim": rng.choice((2, 3, 4, 5, 6)),
    }


def experts(rng: random.Random, count: str = "num_experts") -> Raw:
    """Sizes of a mixture of experts."""
    number = rng.choice((3, 4, 6, 13))
    return {
        count: number,
        "num_experts_per_tok": rng.randint(1, number),
        "moe_intermediate_size": rng.choice((8, 20, 32)),
        "shared_expert_intermediate_size": rng.choice((16, 20, 48)),
    }


def mamba_sizes(rng: random.Random, hidden: int, expand: int) -> tuple[int, int, int]:
    """Heads, their size and groups."""
    channels = expand * hidden
    heads = rng.choice([one for one in (1, 2, 4, 8) if channels % one == 0 and channels // one <= 256])
    return heads, channels // heads, divisor(rng, heads)


def mamba_beside(rng: random.Random, hidden: int) -> Raw:
    """Sizes of Mamba2 as Bamba's configs have them."""
    expand = rng.choice((1, 2, 3))
    heads, head_dim, groups = mamba_sizes(rng, hidden, expand)
    raw: Raw = {"mamba_expand": expand, "mamba_n_heads": heads, "mamba_d_head": rng.choice((head_dim, "auto"))}
    raw |= {"mamba_n_groups": groups, "mamba_d_state": rng.choice((8, 16, 20, 64))}
    raw |= {"mamba_d_conv": rng.choice((2, 3, 4, 5, 6)), "rms_norm_eps": rng.choice((1e-5, 1e-3))}
    raw |= flags(rng, "mamba_conv_bias", "mamba_proj_bias")
    return raw | sometimes(rng, time_step_limit=lambda: [0.05, 0.5])
