"""Arguments of the operators, by their names: what each function is given by keyword, in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernels.compat import test_compat_chunk_scan as scans
from kernels.compat import test_compat_mamba2 as updates
from kernels.compat import test_compat_selective_scan as scans1
from rigs.kernels import attention_batches, batches, lora_batches
from rigs.kernels.batches import Row
from rigs.kernels.delta_calls import good_chunk, good_rows, good_update
from rigs.kernels.delta_samples import (
    ROWS,
    kda_call,
    kda_flash,
    kda_pool,
    kda_update,
    packed,
    vllm_update,
)
from rigs.kernels.draws import draw, normal
from rigs.kernels.expert_batches import make_batch as make_experts
from rigs.kernels.field_lora import metadata
from rigs.kernels.kda_batches import make_kda_batch
from rigs.kernels.mamba_batches import make_mamba_batch
from rigs.kernels.mhc_batches import make_streams
from rigs.kernels.paths import Path
from rigs.kernels.rotary_batches import Row as RotaryRow
from rigs.kernels.rotary_batches import make_rotary_batch
from rigs.kernels.scan_batches import make_scan_batch
from torch import Tensor

from deltaline_kernels import Router, group_tokens, pack_fp8

Given = dict[str, Any]
DIM = 8
LONG = [Row(1), Row(130), Row(9)]


def ints(path: Path, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=path.device)


def pick(batch: object, names: str, **more: Any) -> Given:
    return {name: getattr(batch, name) for name in names.split()} | more


def conv1d(path: Path, lengths: Sequence[int] = (1, 9), **more: Any) -> Given:
    return conv1d_of(batches.make_batch([Row(length) for length in lengths], path), **more)


def conv1d_of(batch: Any, **more: Any) -> Given:
    return pick(batch, "weight bias lines rows", x=batch.qkv) | more


def on_the_way(batch: Any, path: Path) -> Any:
    """Return the batch, which is of LONG rows, with a waypoint whose line is the last."""
    return batch.replaced(rows=batches.plan_rows(LONG, 4, path.device, [(1, 64, 7)]))


def gated_delta(path: Path) -> Given:
    return gated_delta_of(batches.make_batch([Row(1), Row(3, verify=True), Row(9)], path))


def gated_delta_of(batch: Any) -> Given:
    return pick(batch, "qkv a b A_log dt_bias state drafts rows", num_key_heads=batch.layer.H)


def kda(path: Path) -> Given:
    return kda_of(make_kda_batch([Row(1), Row(3, verify=True), Row(9)], path), lower_bound=-5.0)


def kda_of(batch: Any, **more: Any) -> Given:
    return pick(batch, "qkv a b A_log dt_bias state drafts rows", num_key_heads=batch.layer.H, **more)


def mamba2(path: Path) -> Given:
    return mamba2_of(make_mamba_batch([Row(1), Row(3, verify=True), Row(9)], path))


def mamba2_of(batch: Any) -> Given:
    return pick(batch, "xBC dt A_log D dt_bias state drafts rows", num_groups=batch.layer.G, dt_limit=(0.0, 2.0))


def mamba1(path: Path) -> Given:
    return mamba1_of(make_scan_batch([Row(1), Row(3, verify=True), Row(9)], path))


def mamba1_of(batch: Any) -> Given:
    return pick(batch, "x dt BC z A_log D dt_bias state drafts rows", num_groups=batch.layer.G)


def norm(path: Path) -> Given:
    return {"o": draw(path, 3, 2, 8), "z": draw(path, 3, 2, 8), "weight": draw(path, 8), "eps": 1e-6}


def routed(path: Path, router: Router, bias: Tensor | None = None) -> Given:
    return {
        "x": draw(path, 3, 16),
        "logits": draw(path, 3, 8 + router.shared_gate),
        "router": router,
        "gate_up": draw(path, 8 + router.num_shared, 16, 16),
        "down": draw(path, 8 + router.num_shared, 16, 8),
        "bias": None if bias is None else bias.to(path.device),
        "query_start_loc": ints(path, 0, 2),
    }


def hidden_norm(path: Path, **more: Any) -> Given:
    return {"x": draw(path, 3, 16), "weight": normal(16).to(path.device), "eps": 1e-6} | more


def rotary(path: Path) -> Given:
    batch = make_rotary_batch([RotaryRow(3, 15), RotaryRow(1)], path, tokens_of_no_row=0)
    return pick(batch, "q k v q_norm k_norm eps rotary k_pages v_pages page_table rows")


def attention(path: Path, **more: Any) -> Given:
    batch = attention_batches.make_batch([attention_batches.Row(1, 20), attention_batches.Row(3)], path)
    return pick(batch, "q k_pages v_pages page_table rows sinks gate") | more


def latents(path: Path) -> Given:
    layer = attention_batches.Layer(4, 1, 40, 33, is_latent=True)
    batch = attention_batches.make_batch([attention_batches.Row(1, 20), attention_batches.Row(3)], path, layer)
    return pick(batch, "q k_pages page_table rows") | {"v_pages": None, "value_dim": 33}


def streams(path: Path, names: str, **more: Any) -> Given:
    return pick(make_streams(3, 4, 16, path), names) | more


def streams_head(path: Path) -> Given:
    gates = make_streams(3, 4, 16, path).gates
    parameters = {"weight": gates.weight[:4], "scale": gates.scale[:1], "base": gates.base[:4]}
    return streams(path, "residual") | {name: value.contiguous() for name, value in parameters.items()}


def streams_compat(path: Path) -> Given:
    given = make_streams(3, 4, 16, path)
    parameters = {"fn": given.gates.weight, "hc_scale": given.gates.scale, "hc_base": given.gates.base}
    numbers = {"rms_eps": 1e-6, "hc_pre_eps": 1e-6, "hc_sinkhorn_eps": 1e-6, "hc_post_mult_value": 2.0}
    return {"residual": given.residual} | parameters | numbers | {"sinkhorn_repeat": 3}


def streams_mixed(path: Path) -> Given:
    mixing = {"post_layer_mix": normal(3, 4).to(path.device), "comb_res_mix": normal(3, 4, 4).to(path.device)}
    return streams(path, "x residual", **mixing)


def lora(path: Path) -> Given:
    batch = lora_batches.make_batch(path, [1, -1, 0], [[4], [2]], factors=True)
    tiles = group_tokens(batch.token_slots, 2)
    tiles.tokens[tiles.slots < 0] = -1  # unspecified there
    x = batch.x.nan_to_num()
    return {"x": x, "out": batch.out, "weights": batch.weights, "tiles": tiles}


def lora_rows(path: Path, *, shrink: bool) -> Given:
    seven = metadata([1, -1, 0], 2, path.device)
    if shrink:
        weights, out = [draw(path, 2, 4, 16) for _ in range(2)], torch.zeros(2, 3, 4, device=path.device)
        return {"inputs": draw(path, 3, 16), "lora_a_weights": weights, "output_tensor": out, "scaling": 0.5} | seven
    weights, inputs = [draw(path, 2, 16, 4) for _ in range(2)], normal(2, 3, 4).to(path.device)
    return {"inputs": inputs, "lora_b_weights": weights, "output_tensor": draw(path, 3, 32)} | seven


def conv_sequences(path: Path) -> Given:
    states = draw(path, 4, 3, DIM).transpose(1, 2)
    index = {"cache_indices": ints(path, 2, 0), "has_initial_state": ints(path, 1, 0).bool()}
    tokens = {"x": draw(path, 5, DIM).t(), "query_start_loc": ints(path, 0, 2, 5)}
    return tokens | index | {"weight": draw(path, DIM, 4), "bias": draw(path, DIM), "conv_states": states}


def conv_batch(path: Path, **more: Any) -> Given:
    told = {"x": draw(path, 2, DIM, 3), "weight": draw(path, DIM, 4), "initial_states": draw(path, 2, DIM, 3)}
    return told | {"activation": "silu"} | more


def conv_rows(path: Path, *shape: int, **more: Any) -> Given:
    states = draw(path, 4, 3, DIM).transpose(1, 2)
    told = {"x": draw(path, *shape), "conv_state": states, "weight": draw(path, DIM, 4), "activation": "silu"}
    return told | {"conv_state_indices": ints(path, 2, 0)} | more


def without(given: Given, *names: str, **more: Any) -> Given:
    return {name: value for name, value in given.items() if name not in names} | more


def elsewhere(given: Given, states: str, **slots: Tensor) -> Given:
    """Return the call with other slots to write, of states of their own."""
    return given | {"final_state": torch.zeros_like(given[states])} | slots


def selective_update(path: Path, **changes: Any) -> Given:
    # A value per head is one expanded over the rest, which a copy is not unless there is no more of it.
    case = updates.Case([2, 1], [4, 1], heads=(1, 2, 1, 1), **changes)
    return updates.make_call(case, path)[1] | {"state": updates.make_states(case, range(9)).to(path.device)}


def channel_update(path: Path) -> Given:
    """Values of each channel, without heads."""
    told: Given = scans1.update_of(path, 3, heads=0, dim=6, G=1, S=4)[1]
    return told | {"state": draw(path, 4, 6, 4), "state_batch_indices": ints(path, 2, -1, 0)}


def packed_scan(path: Path) -> Given:
    tokens = {
        name: draw(path, *size) for name, size in {"u": (4, 5), "delta": (4, 5), "B": (3, 5), "C": (3, 5)}.items()
    }
    index = {"query_start_loc": ints(path, 0, 2, 5), "cache_indices": ints(path, 2, 0)}
    return tokens | index | {"A": -draw(path, 4, 3).abs(), "ssm_states": draw(path, 4, 4, 3), "delta_softplus": True}


def experts(path: Path, num_tokens: int, activation: str = "silu") -> Given:
    batch = make_experts(path, num_tokens, 2, 3, 16, 16, activation=activation)
    return pick(batch, "x gate_up down weights experts activation")


def fp8(path: Path) -> Given:
    weight = pack_fp8(normal(130, 140).to(path.device).to(torch.float8_e4m3fn))
    scales = normal(2, 2).to(path.device).exp()
    return {"x": draw(path, 3, 140), "weight": weight, "scales": scales, "out": draw(path, 3, 130)}


def field_experts(path: Path, **more: Any) -> Given:
    given = experts(path, 5)
    names = {"hidden_states": "x", "w1": "gate_up", "w2": "down", "topk_weights": "weights", "topk_ids": "experts"}
    return {name: given[own] for name, own in names.items()} | more


def dense(path: Path, **more: Any) -> Given:
    return {"query": draw(path, 2, 4, 3, 16), "key": draw(path, 2, 2, 9, 16), "value": draw(path, 2, 2, 9, 8)} | more


SAMPLES: dict[str, list[Callable[[Path], Given]]] = {
    "add_lora": [lora],
    "add_rms_norm": [
        lambda path: hidden_norm(path, residual=draw(path, 3, 16)),
        lambda path: hidden_norm(path, residual=normal(3, 16).to(path.device), scale=0.5),
    ],
    "causal_conv1d": [
        conv1d,
        lambda path: conv1d(path, split=(16, 16, 16), activation=None),
        lambda path: conv1d_of(on_the_way(batches.make_batch(LONG, path), path)),
    ],
    "causal_conv1d_fn": [
        conv_sequences,
        lambda path: {"x": draw(path, 2, DIM, 3), "weight": draw(path, DIM, 4), "use_cache": True},
        lambda path: conv_batch(path, seq_idx=ints(path, 0, 0, 1, 1, 2, -1).view(2, 3)),
        lambda path: conv_sequences(path) | {"x": draw(path, DIM, 5)},
        lambda path: conv_batch(path, return_final_states=True),
        lambda path: conv_batch(path, return_final_states=True, final_states_out=draw(path, 2, DIM, 3)),
        lambda path: without(
            conv_sequences(path), "conv_states", "cache_indices", "has_initial_state", conv_states=None
        ),
    ],
    "causal_conv1d_update": [
        lambda path: conv_rows(path, 2, DIM),
        lambda path: conv_rows(path, 2, DIM, 2),
        lambda path: conv_rows(path, 2, DIM, out=draw(path, 2, DIM)),
    ],
    "causal_conv1d_varlen_states": [
        lambda path: {"x": draw(path, 5, DIM), "cu_seqlens": ints(path, 0, 1, 5), "state_len": 3},
    ],
    "chunk_gated_delta_rule": [
        lambda path: good_chunk(path, ROWS) | {"output_final_state": True},
        lambda path: without(good_chunk(path, ROWS), "initial_state", use_cache=True),
        lambda path: without(
            good_chunk(path, ROWS), "initial_state", output_final_state=True, state_v_first=False, chunk_size=64
        ),
    ],
    "chunk_kda": [
        lambda path: kda_call(path, output_final_state=True),
        lambda path: kda_call(path, initial_state=normal(2, 2, 8, 16).to(path.device), state_v_first=True),
        lambda path: kda_call(
            path, use_gate_in_kernel=True, lower_bound=-5.0, use_beta_sigmoid_in_kernel=True, use_graph=True
        ),
        lambda path: kda_call(path, return_intermediate_states=True, output_final_state=True, cu_seqlens=None),
    ],
    "compat_mhc_post": [streams_mixed],
    "compat_mhc_pre": [
        streams_compat,
        lambda path: streams_compat(path) | {"norm_weight": draw(path, 16), "norm_eps": 1e-6},
    ],
    "flash_kda_fwd": [kda_flash],
    "flex_decode": [attention, lambda path: attention(path, return_lse=True, scale=0.1), latents],
    "flex_decoding": [dense, lambda path: dense(path, mask_mod="causal", return_lse=True)],
    "fused_experts": [
        lambda path: field_experts(path),
        lambda path: field_experts(path, inplace=True, expert_map=ints(path, 1, -1, 0)),
    ],
    "fused_kda_gate": [lambda path: {"g": draw(path, 5, 2, 16), "lower_bound": -5.0}],
    "fused_recurrent_gated_delta_rule": [
        lambda path: good_rows(path, ROWS),
        lambda path: without(good_chunk(path, ROWS), inplace_final_state=False),
        lambda path: good_chunk(path, ROWS) | {"output_final_state": True},
        lambda path: without(good_chunk(path, ROWS), "initial_state"),
        lambda path: elsewhere(good_rows(path, ROWS), "initial_state", output_state_indices=ints(path, 2, 0)),
    ],
    "fused_recurrent_gated_delta_rule_packed_decode": [packed],
    "fused_recurrent_kda": [kda_pool, lambda path: kda_call(path, output_final_state=True, chunk_size=64)],
    "fused_recurrent_kda_packed_decode": [lambda path: packed(path, keyed=True) | {"lower_bound": -5.0}],
    "fused_sigmoid_gating_delta_rule_update": [
        kda_update,
        lambda path: good_update(path, ROWS) | {"is_kda": False},
        lambda path: elsewhere(good_update(path, ROWS), "initial_state_source", output_state_indices=ints(path, 2, 0)),
        vllm_update,
    ],
    "gated_delta": [gated_delta, lambda path: gated_delta_of(on_the_way(batches.make_batch(LONG, path), path))],
    "gated_rms_norm": [norm],
    "group_tokens": [lambda path: {"token_slots": ints(path, 1, -1, 0), "num_slots": 2, "max_rank": 8}],
    "kda": [kda, lambda path: kda_of(on_the_way(make_kda_batch(LONG, path), path))],
    "lora_expand": [lambda path: lora_rows(path, shrink=False)],
    "lora_shrink": [lambda path: lora_rows(path, shrink=True)],
    "linear": [lambda path: {"x": draw(path, 3, 16), "weight": draw(path, 5, 16)}],
    "mamba1": [
        lambda path: mamba1(path) | {"z": None},
        lambda path: mamba1_of(on_the_way(make_scan_batch(LONG, path), path)),
    ],
    "mamba2": [mamba2, lambda path: mamba2_of(on_the_way(make_mamba_batch(LONG, path), path))],
    "mamba_chunk_scan_combined_varlen": [
        lambda path: scans.make_call(scans.Scan((5, 3)), path),
        lambda path: scans.make_call(scans.Scan((5, 3), pool=True), path),
    ],
    "mhc_fused_post_pre": [lambda path: streams_mixed(path) | streams_compat(path)],
    "mhc_head": [streams_head],
    "mhc_post": [lambda path: streams(path, "x residual post comb")],
    "mhc_post_pre": [lambda path: streams(path, "x residual post comb gates")],
    "mhc_pre": [
        lambda path: streams(path, "residual gates"),
        lambda path: streams(path, "residual gates", out=draw(path, 3, 16)),
    ],
    "multiply_fp8": [fp8],
    "rms_norm": [hidden_norm],
    "rotate_and_store": [rotary],
    "route_tokens": [
        lambda path: {"logits": draw(path, 3, 9), "router": Router(2, num_shared=1, shared_gate=True)},
        lambda path: {
            "logits": draw(path, 3, 8),
            "router": Router(2, "sigmoid", num_groups=4, top_groups=2, scale=2.5),
            "bias": normal(8).to(path.device),
            "query_start_loc": ints(path, 0, 2),
        },
    ],
    "route_and_run_experts": [
        lambda path: routed(path, Router(2, num_shared=1, shared_gate=True)),
        lambda path: routed(path, Router(2, "sigmoid", num_groups=4, top_groups=2, num_shared=1), normal(8)),
    ],
    "run_experts": [
        lambda path: experts(path, 3),
        lambda path: experts(path, 70, "relu2"),
        lambda path: pick(
            make_experts(path, 3, 2, 3, 16, 16).in_fp8(),
            "x gate_up down weights experts activation gate_up_scales down_scales",
        ),
    ],
    "selective_scan_fn": [
        lambda path: scans1.batch_of(path, 5, 1),
        lambda path: scans1.batch_of(path, 5, None) | {"return_last_state": True, "delta_softplus": True},
    ],
    "selective_scan_varlen": [
        packed_scan,
        lambda path: scans1.batch_of(path, 5, 2) | {"ssm_states": draw(path, 3, 4, 8), "block_size": 8},
    ],
    "selective_state_update": [
        channel_update,
        selective_update,
        lambda path: selective_update(path, out=torch.float32),
        lambda path: elsewhere(selective_update(path), "state", dst_state_batch_indices=ints(path, 2, 0)),
        lambda path: selective_update(path) | {"intermediate_states_buffer": draw(path, 5, 2, 2, 1, 1)},
    ],
    "silu_and_mul": [lambda path: {"gate_up": draw(path, 3, 16)}],
    "spread_slots": [
        lambda path: {"row_slots": ints(path, 1, 0), "query_start_loc": ints(path, 0, 2, 3), "num_tokens": 4}
    ],
}
