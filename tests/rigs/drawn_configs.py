"""Configs of small models drawn at random over all families and what their configs may say, as config.json has them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rigs.drawn_keys import (
    Raw,
    attention,
    delta,
    divisor,
    either,
    even_heads,
    experts,
    flags,
    kinds,
    mamba_beside,
    mamba_sizes,
    rope,
    sometimes,
)

# What each family is not served with: a key and its value.
BEYOND: Mapping[str, tuple[str, Any]] = {
    "mamba2": ("hidden_act", "gelu"),
    "nemotron_h": ("mamba_hidden_act", "gelu"),
    "zamba2": ("hidden_act", "gelu_new"),
    "lfm2": ("conv_L_cache", 7),
    "lfm2_moe": ("conv_L_cache", 7),
    "granitemoehybrid": ("position_embedding_type", "alibi"),
    "olmo_hybrid": ("linear_conv_kernel_dim", 7),
    "bamba": ("mamba_d_conv", 7),
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}


@dataclass(frozen=True)
class Draw:
    """A config. refused: the key that it is refused by, None where it is to be served."""

    raw: Raw
    refused: str | None = None


def draw(seed: int) -> Draw:
    """The config of a seed; the families take turns."""
    rng = random.Random(seed)
    families = list(FAMILIES)
    model_type = families[seed % len(families)]
    raw: Raw = {"model_type": model_type, "hidden_size": rng.choice((32, 36, 48, 50, 64, 80)), "vocab_size": 8}
    # The first two are the oracle's own: of larger ones it computes the whole of few tokens.
    raw |= {"chunk_size": 32, "mamba_chunk_size": 32, "pad_token_id": None, "eos_token_id": None}
    raw |= FAMILIES[model_type](rng, raw["hidden_size"])
    if raw.get("use_shared_attention_adapter") and (raw["num_key_value_heads"] or 99) < raw["num_attention_heads"]:
        return Draw(raw, "num_key_value_heads")
    if rng.random() < 0.1:
        key, value = BEYOND.get(model_type, ("hidden_act", "gelu"))
        return Draw(raw | {key: value}, key)
    if rotates(raw) and rng.random() < 0.05:
        return Draw(raw | {"rope_scaling": None, "rope_parameters": LONGROPE}, "rope_parameters.rope_type")
    return Draw(raw)


def rotates(raw: Raw) -> bool:
    """Whether attention has rotary embeddings."""
    bare = ("mamba", "falcon_mamba", "mamba2")
    if raw["model_type"] in (*bare, "jamba", "nemotron_h", "kimi_linear", "glm5_next_text"):
        return False
    if raw["model_type"] in ("zamba2", "granitemoehybrid"):
        return bool(raw.get("use_mem_rope")) or raw.get("position_embedding_type") == "rope"
    return raw["model_type"] != "olmo_hybrid" or "rope_theta" not in (raw["rope_parameters"] or {"rope_theta": None})


def qwen(rng: random.Random, hidden: int) -> Raw:
    share = rng.choice((0.25, 0.5, 1.0))
    raw = {"num_hidden_layers": 3, "intermediate_size": rng.choice((40, 96)), "rms_norm_eps": rng.choice((1e-6, 1e-3))}
    raw |= delta(rng) | attention(rng, (16, 24, 32, 96)) | rope(rng, share) | flags(rng, "attention_bias")
    if rng.random() < 0.3:
        return raw | {"full_attention_interval": rng.choice((1, 2, 3))}
    return raw | {"layer_types": kinds(rng, "linear_attention", "full_attention")}


def qwen_moe(rng: random.Random, hidden: int) -> Raw:
    return qwen(rng, hidden) | experts(rng)


def qwen3_next(rng: random.Random, hidden: int) -> Raw:
    raw = qwen_moe(rng, hidden) | flags(rng, "norm_topk_prob")
    raw |= sometimes(rng, decoder_sparse_step=lambda: 2, mlp_only_layers=lambda: [rng.randrange(3)])
    return raw | sometimes(rng, 0.1, num_experts=lambda: 0)


def mamba2(rng: random.Random, hidden: int) -> Raw:
    expand = rng.choice((1, 2, 3))
    heads, head_dim, groups = mamba_sizes(rng, hidden, expand)
    raw: Raw = {"num_hidden_layers": 2, "expand": expand, "num_heads": heads, "head_dim": head_dim, "n_groups": groups}
    raw |= {"state_size": rng.choice((8, 16, 20, 64)), "conv_kernel": rng.choice((2, 3, 4, 5, 6))}
    raw |= flags(rng, "use_bias", "use_conv_bias", "residual_in_fp32")
    return raw | sometimes(
        rng, layer_norm_epsilon=lambda: rng.choice((1e-3, 1e-6)), time_step_limit=lambda: rng.choice(([0.05, 0.5],))
    )


def mamba1(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 2, "expand": rng.choice((1, 2, 3)), "time_step_rank": rng.choice((1, 5, "auto"))}
    raw |= {"state_size": rng.choice((1, 8, 16, 20)), "conv_kernel": rng.choice((2, 3, 4, 5, 6))}
    raw |= flags(rng, "use_bias", "use_conv_bias", "residual_in_fp32")
    return raw | sometimes(rng, layer_norm_epsilon=lambda: rng.choice((1e-3, 1e-6)), mixer_rms_eps=lambda: 1e-3)


def jamba(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 3, "intermediate_size": rng.choice((40, 96))} | even_heads(rng, hidden)
    raw["num_key_value_heads"] = divisor(rng, raw["num_attention_heads"])  # its config takes no null
    for name, periods in (("attn_layer", (2, 3, 8)), ("expert_layer", (1, 2, 3))):
        period = rng.choice(periods)
        raw |= {f"{name}_period": period, f"{name}_offset": rng.randrange(period)}
    raw |= {"num_experts": rng.choice((1, 4, 7)), "num_experts_per_tok": rng.choice((1, 2))}
    raw["num_experts_per_tok"] = min(raw["num_experts"], raw["num_experts_per_tok"])
    raw |= {"mamba_expand": rng.choice((1, 2, 3)), "mamba_dt_rank": rng.choice((1, 5, "auto"))}
    raw |= {"mamba_d_state": rng.choice((8, 16, 20)), "mamba_d_conv": rng.choice((2, 3, 4, 6))}
    return raw | flags(rng, "mamba_conv_bias", "mamba_proj_bias") | sometimes(rng, rms_norm_eps=lambda: 1e-3)


def bamba(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 3, "attn_layer_indices": sorted(rng.sample(range(3), rng.randint(1, 2)))}
    raw |= {"intermediate_size": rng.choice((40, 96))} | mamba_beside(rng, hidden) | even_heads(rng, hidden)
    raw |= flags(rng, "attention_bias", "mlp_bias")
    if rng.random() < 0.5:
        raw["head_dim"] = rng.choice((8, 16, 32))
    kind = rope(rng)
    place = kind["rope_scaling" if kind.get("rope_scaling") else "rope_parameters"]
    # The half of a head that has an odd number of pairs is not to be had.
    head_dim = raw.get("head_dim", hidden // raw["num_attention_heads"])
    place["partial_rotary_factor"] = rng.choice((0.5, 1.0)) if head_dim % 8 == 0 else 1.0
    return raw | kind


def granite(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 3} | mamba_beside(rng, hidden) | even_heads(rng, hidden) | rope(rng)
    names = ("mamba", "attention") if rng.random() < 0.5 else ("linear_attention", "full_attention")
    key = "layers_block_type" if names[0] == "linear_attention" and rng.random() < 0.5 else "layer_types"
    raw |= {key: kinds(rng, *names), "intermediate_size": rng.choice((20, 32))}
    raw |= {"shared_intermediate_size": rng.choice((20, 48)), "num_local_experts": rng.choice((0, 3, 5, 13))}
    raw |= {"num_experts_per_tok": rng.randint(1, raw["num_local_experts"] or 2)} | flags(rng, "attention_bias")
    return raw | sometimes(
        rng,
        0.6,
        position_embedding_type=lambda: rng.choice(("rope", "rope", "nope")),
        residual_multiplier=lambda: rng.choice((0.22, 1.0)),
        attention_multiplier=lambda: rng.choice((0.0625, 0.3)),
        head_dim=lambda: rng.choice((8, 16, 32)),
    )


def falcon(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 2, "intermediate_size": rng.choice((40, 96))} | mamba_beside(rng, hidden)
    raw |= attention(rng) | rope(rng)
    raw |= flags(rng, "attention_bias", "mlp_bias", "projectors_bias", "mamba_rms_norm", "mamba_norm_before_gate")
    own = rng.choice((None, 64, 96))
    if own is not None:
        raw["mamba_n_heads"] = heads = rng.choice((1, 2, 4))
        raw |= {"mamba_n_groups": divisor(rng, heads), "mamba_d_head": rng.choice((own // heads, "auto"))}
    raw["mamba_d_ssm"] = own
    multipliers = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    raw |= sometimes(rng, 0.3, **{f"{one}_multiplier": lambda: rng.choice((0.3, 1.25)) for one in multipliers})
    return raw | sometimes(
        rng, ssm_multipliers=lambda: [rng.choice((0.3, 1.25)) for _ in range(5)], mlp_multipliers=lambda: [0.8, 1.3]
    )


def zamba(rng: random.Random, hidden: int) -> Raw:
    expand = rng.choice((1, 2, 3))
    heads, head_dim, groups = mamba_sizes(rng, hidden, expand)
    raw: Raw = {"num_hidden_layers": 3, "intermediate_size": rng.choice((40, 96)), "mamba_expand": expand}
    raw |= {"n_mamba_heads": heads, "mamba_ngroups": groups, "mamba_d_state": rng.choice((8, 16, 20))}
    raw |= {"mamba_d_conv": rng.choice((2, 3, 4, 5)), "adapter_rank": rng.choice((2, 5))} | even_heads(rng, hidden)
    raw |= rope(rng) | flags(rng, "use_mem_rope", "add_bias_linear", "use_shared_attention_adapter", "use_conv_bias")
    raw |= {"num_mem_blocks": rng.choice((1, 2)), "layers_block_type": kinds(rng, "hybrid", "mamba")}
    return raw | sometimes(rng, rms_norm_eps=lambda: 1e-3, mamba_headdim=lambda: head_dim, hidden_act=lambda: "gelu")


def lfm2(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 3, "intermediate_size": rng.choice((40, 96))} | even_heads(rng, hidden) | rope(rng)
    raw |= {"conv_L_cache": rng.choice((2, 3, 4, 5, 6)), "layer_types": kinds(rng, "conv", "full_attention")}
    raw["num_key_value_heads"] = divisor(rng, raw["num_attention_heads"])
    raw |= flags(rng, "conv_bias", "block_auto_adjust_ff_dim")
    return raw | sometimes(
        rng,
        norm_eps=lambda: 1e-3,
        head_dim=lambda: rng.choice((8, 16, 32)),
        block_ff_dim=lambda: 72,
        block_multiple_of=lambda: rng.choice((8, 24)),
        block_ffn_dim_multiplier=lambda: rng.choice((1.3, 0.7)),
    )


def lfm2_by_numbers(rng: random.Random, hidden: int) -> Raw:
    raw = lfm2(rng, hidden)
    return raw if rng.random() < 0.6 else raw | {"layer_types": None, "full_attn_idxs": rng.choice(([1], [0, 2]))}


def lfm2_moe(rng: random.Random, hidden: int) -> Raw:
    raw = {key: value for key, value in lfm2(rng, hidden).items() if not key.startswith("block_")}
    raw |= {"num_dense_layers": rng.choice((0, 1, 2))} | experts(rng) | flags(rng, "use_expert_bias", "norm_topk_prob")
    return raw | sometimes(rng, routed_scaling_factor=lambda: 2.5)


def olmo(rng: random.Random, hidden: int) -> Raw:
    raw: Raw = {"num_hidden_layers": 3, "intermediate_size": rng.choice((40, 96))} | even_heads(rng, hidden)
    raw |= rope(rng) if rng.random() < 0.6 else {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    raw |= {"layer_types": kinds(rng, "linear_attention", "full_attention")} | delta(rng)
    if rng.random() < 0.3:
        raw |= dict.fromkeys([key for key in raw if key.startswith("linear_") and "conv" not in key])
    return raw | flags(rng, "attention_bias", "linear_allow_neg_eigval") | sometimes(rng, rms_norm_eps=lambda: 1e-3)


def nemotron(rng: random.Random, hidden: int) -> Raw:
    heads = rng.choice((1, 2, 4, 8))
    raw: Raw = {"mamba_num_heads": heads, "mamba_head_dim": rng.choice((8, 12, 32)), "n_groups": divisor(rng, heads)}
    raw |= {"ssm_state_size": rng.choice((8, 16, 20)), "conv_kernel": rng.choice((2, 3, 4, 5))}
    raw |= attention(rng, (8, 15, 16, 33, 96)) | {"intermediate_size": rng.choice((40, 96))}
    names = ("linear_attention", "full_attention", "mlp", "moe")
    types = kinds(rng, *names, layers=4)
    letters = dict(zip(names, "M*-E", strict=True))
    how = rng.choice(("layers_block_type", "layer_types", "hybrid_override_pattern"))
    raw[how] = "".join(letters[kind] for kind in types) if how == "hybrid_override_pattern" else types
    if how == "layer_types":  # what it goes before
        raw |= sometimes(rng, layers_block_type=lambda: ["mlp"], num_hidden_layers=lambda: 9)
    groups = rng.choice((1, 2, 3))
    number = groups * rng.choice((2, 4, 5))
    top = rng.randint(1, groups)
    raw |= either(rng, "num_local_experts", "n_routed_experts", number, 3) | {"n_group": groups, "topk_group": top}
    raw |= {"num_experts_per_tok": rng.randint(1, top * number // groups), "moe_intermediate_size": rng.choice((8, 20))}
    raw |= {"moe_shared_expert_intermediate_size": rng.choice((16, 50))}
    raw |= flags(rng, "use_bias", "mlp_bias", "use_conv_bias", "norm_topk_prob")
    return raw | sometimes(
        rng,
        moe_latent_size=lambda: rng.choice((12, 40)),
        routed_scaling_factor=lambda: 2.5,
        time_step_min=lambda: rng.choice((0.01, 0.2)),
        layer_norm_epsilon=lambda: 1e-3,
    )


def kimi(rng: random.Random, hidden: int) -> Raw:
    heads = rng.choice((1, 2, 3, 4))
    raw: Raw = {"num_hidden_layers": 3, "intermediate_size": rng.choice((40, 96)), "num_attention_heads": heads}
    raw |= {"num_key_value_heads": rng.choice((None, heads)), "kv_lora_rank": rng.choice((8, 24, 40))}
    raw |= {"qk_nope_head_dim": rng.choice((8, 20, 32)), "qk_rope_head_dim": rng.choice((0, 2, 8, 16))}
    raw |= {"v_head_dim": rng.choice((8, 20, 32)), "q_lora_rank": rng.choice((None, 12))}
    raw |= either(rng, "model_max_length", "max_position_embeddings", rng.choice((50, 64, 200)), 10)
    sizes = rng.choice((1, 2, 3)), rng.choice((8, 16, 32)), rng.choice((2, 3, 4, 5, 6))
    types = kinds(rng, "linear_attention", "full_attention")
    if rng.random() < 0.5:
        own: Raw = dict(zip(("num_heads", "head_dim", "short_conv_kernel_size"), sizes, strict=True))
        own["kda_layers"] = [i for i, kind in enumerate(types, 1) if kind == "linear_attention"]
        own["full_attn_layers"] = [i for i, kind in enumerate(types, 1) if kind == "full_attention"]
        raw["linear_attn_config"] = own
    else:
        keys = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
        raw |= {"layer_types": types} | dict(zip(keys, sizes, strict=True))
    groups = rng.choice((1, 2, 3))
    number, top = groups * rng.choice((2, 4, 5)), rng.randint(1, groups)
    chosen = rng.randint(1, top * number // groups)
    raw |= {"topk_group": top, "moe_intermediate_size": rng.choice((8, 20))}
    raw |= either(rng, "num_experts", "num_local_experts", number, 2)
    raw |= either(rng, "num_expert_group", "n_group", groups, 1)
    raw |= either(rng, "num_experts_per_token", "num_experts_per_tok", chosen, 1)
    raw |= either(rng, "moe_renormalize", "norm_topk_prob", rng.random() < 0.5, True)
    return raw | sometimes(
        rng,
        n_shared_experts=lambda: rng.choice((1, 2)),
        routed_scaling_factor=lambda: 1.5,
        rms_norm_eps=lambda: 1e-3,
        first_k_dense_replace=lambda: rng.choice((0, 1, 2)),
        mlp_layer_types=lambda: kinds(rng, "dense", "sparse"),
    )


def glm5_next(rng: random.Random, hidden: int) -> Raw:
    heads, layers = rng.choice((1, 2, 3)), 3
    raw: Raw = {"num_hidden_layers": layers, "intermediate_size": rng.choice((40, 96)), "num_attention_heads": heads}
    raw |= {"num_key_value_heads": heads, "kv_lora_rank": rng.choice((8, 24, 40)), "q_lora_rank": rng.choice((12, 20))}
    raw |= {"qk_nope_head_dim": rng.choice((8, 20)), "qk_rope_head_dim": 0, "v_head_dim": rng.choice((8, 20, 32))}
    raw |= {"index_topk": 64, "index_kpool": 4, "index_n_heads": 2, "index_head_dim": 8, "max_position_embeddings": 64}
    full = rng.choice(("full_attention", "deepseek_sparse_attention"))
    raw |= {"layer_types": kinds(rng, "linear_attention", full), "mlp_layer_types": kinds(rng, "dense", "sparse")}
    sizes = rng.choice((1, 2, 3)), rng.choice((8, 16, 32)), rng.choice((2, 3, 4, 5, 6))
    if rng.random() < 0.5:
        own: Raw = dict(zip(("num_heads", "head_dim", "short_conv_kernel_size"), sizes, strict=True))
        own |= sometimes(rng, gate_lower_bound=lambda: rng.choice((-2.0, None)), safe_gate=lambda: rng.random() < 0.5)
        raw["linear_attn_config"] = own
    else:
        raw |= dict(zip(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), sizes, strict=True))
        raw |= sometimes(rng, linear_lower_bound=lambda: rng.choice((-2.0, None)))
    groups = rng.choice((1, 2))
    number, top = groups * rng.choice((2, 4, 5)), rng.randint(1, groups)
    raw |= {"n_routed_experts": number, "n_group": groups, "topk_group": top, "hc_mult": rng.choice((2, 3, 4))}
    raw |= {"num_experts_per_tok": rng.randint(1, top * number // groups), "moe_intermediate_size": rng.choice((8, 20))}
    return raw | sometimes(
        rng,
        n_shared_experts=lambda: 2,
        routed_scaling_factor=lambda: 1.5,
        norm_topk_prob=lambda: False,
        rms_norm_eps=lambda: 1e-3,
        swiglu_limit=lambda: rng.choice((0.5, 3.0)),
        hc_eps=lambda: 1e-4,
        hc_sinkhorn_iters=lambda: rng.choice((1, 3)),
    )


FAMILIES: Mapping[str, Callable[[random.Random, int], Raw]] = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen,
    "qwen3_5_moe_text": qwen_moe,
    "mamba2": mamba2,
    "nemotron_h": nemotron,
    "bamba": bamba,
    "falcon_h1": falcon,
    "granitemoehybrid": granite,
    "zamba2": zamba,
    "lfm2": lfm2_by_numbers,
    "lfm2_moe": lfm2_moe,
    "olmo_hybrid": olmo,
    "kimi_linear": kimi,
    "glm5_next_text": glm5_next,
    "mamba": mamba1,
    "falcon_mamba": mamba1,
    "jamba": jamba,
}

# In place of a value: the key is not there.
GONE = object()
LIES: tuple[Any, ...] = (
    *(None, True, False, GONE, "", "x", "auto", [], {}, [1], [None], ["x"], {"x": 1}, [[]], {"rope_type": "yarn"}),
    *(-1, 0, 1, 2, 3, 7, 255, 1 << 20, 1 << 62, 10**400, -2.5, 0.0, 1e-320, 0.5, 1e300, float("inf"), float("nan")),
)


def lie(rng: random.Random, raw: Raw) -> Raw:
    """The same config, in which one to three values are others, also in objects and lists."""
    told = copy.deepcopy(raw)
    for _ in range(rng.randint(1, 3)):
        place: Any = told
        key: Any = rng.choice([one for one in told if one != "model_type"])
        while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
            place = place[key]
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        value = rng.choice(LIES)
        if value is not GONE:
            place[key] = copy.deepcopy(value)
        else:
            del place[key]
    return told
