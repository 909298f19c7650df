"""Arguments of the engines' delta rules, by keyword: those of the operators' samples."""

from __future__ import annotations

from typing import Any

from rigs.kernels.delta_calls import Case, good_chunk, good_update
from rigs.kernels.draws import draw, ints, normal
from rigs.kernels.paths import Path

Given = dict[str, Any]
ROWS = Case([2, 1], [4, 1])


def chunk_pool(path: Path, *, dense: bool = True) -> Given:
    return good_chunk(path, Case([3] * 2, dense=dense)) | {"initial_state_indices": ints(1, -1).to(path.device)}


def vllm_update(path: Path) -> Given:
    """A table, and the pool by another name."""
    told = good_update(path, Case([2, 1], [[4, 2], [1, 0]]))
    told |= {"num_accepted_tokens": ints(2, 1).to(path.device), "ssm_state_indices": told.pop("initial_state_indices")}
    return told | {"initial_state": told.pop("initial_state_source")}


def packed(path: Path, *, keyed: bool = False) -> Given:
    """Two rows of one token, q, k and v as columns of one tensor."""
    decays = 32 if keyed else 2
    told: Given = {"mixed_qkv": draw(path, 2, 50)[:, :48], "a": draw(path, 2, decays), "b": draw(path, 2, 2)}
    told |= {"A_log": normal(2).to(path.device), "dt_bias": normal(decays).to(path.device), "scale": 0.25}
    told |= {"initial_state": normal(3, 2, 8, 16).to(path.device), "out": draw(path, 2, 1, 2, 8)}
    return told | {"ssm_state_indices": ints(2, 0).to(path.device)}


def kda_call(path: Path, **more: Any) -> Given:
    """Arguments that the engines' functions of KDA have in common, of two rows."""
    told = {"q": draw(path, 1, 5, 1, 16), "k": draw(path, 1, 5, 1, 16), "v": draw(path, 1, 5, 2, 8)}
    told |= {"g": -draw(path, 1, 5, 2, 16).abs(), "beta": draw(path, 1, 5, 2).sigmoid()}
    return told | {"cu_seqlens": ints(0, 3, 5).to(path.device), "use_qk_l2norm_in_kernel": True} | more


def kda_pool(path: Path) -> Given:
    pool = normal(3, 2, 8, 16).to(path.device)
    slots = ints(2, 0).to(path.device)
    return kda_call(path, initial_state=pool, ssm_state_indices=slots, state_v_first=True)


def chunk_kda_pool(path: Path, **more: Any) -> Given:
    """With the gate computed in the kernel, as SGLang asks for it."""
    gate = {"A_log": normal(2).to(path.device), "dt_bias": normal(32).to(path.device), "lower_bound": -5.0}
    pool, slots = normal(3, 2, 8, 16).to(path.device), ints(2, 0).to(path.device)
    return kda_call(path, initial_state=pool, initial_state_indices=slots, **gate) | more


def kda_flash(path: Path) -> Given:
    told: Given = {"q": draw(path, 1, 5, 2, 16), "k": draw(path, 1, 5, 2, 16), "v": draw(path, 1, 5, 2, 8)}
    told |= {"g": draw(path, 1, 5, 2, 16), "beta": draw(path, 1, 5, 2), "scale": 0.25, "out": draw(path, 1, 5, 2, 8)}
    told |= {"A_log": normal(2).to(path.device), "dt_bias": normal(2, 16).to(path.device), "lower_bound": -5.0}
    return told | {"final_state": normal(1, 2, 8, 16).to(path.device)}


def kda_update(path: Path) -> Given:
    told = good_update(path, ROWS)
    _, HV, K, _ = ROWS.heads
    a = draw(path, *told["a"].shape[:-1], HV * K)
    return told | {"a": a, "dt_bias": normal(HV * K).to(path.device), "is_kda": True, "lower_bound": -5.0}
