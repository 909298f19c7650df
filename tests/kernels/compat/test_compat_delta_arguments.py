"""What the engines' gated delta rule says of wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.delta_calls import Case, good_chunk, good_rows, good_update, table
from rigs.kernels.draws import ints, normal
from rigs.kernels.paths import Path

from deltaline_kernels.compat import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    fused_sigmoid_gating_delta_rule_update,
)

CHUNK, ROW, UPDATE = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, fused_sigmoid_gating_delta_rule_update
FLAG = "use_qk_l2norm_in_kernel"
TABLE: Any = "a call of fused_recurrent_gated_delta_rule with a table"

TWO_KEYS = normal(1, 4, 2, 16)
WRONG: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
    (CHUNK, TypeError, "q: expected a tensor, got list", {"q": [1.0]}),
    (CHUNK, ValueError, "q: expected shape .batch, tokens, H, K.", {"q": normal(4, 1, 16)}),
    (CHUNK, ValueError, "k: expected shape .batch=1, tokens=4, H=1, K=16.", {"k": normal(1, 3, 1, 16)}),
    (CHUNK, ValueError, "k: expected shape .batch=1, tokens=4, H=1, K=16.", {"k": normal(1, 4, 2, 16)}),
    (CHUNK, TypeError, "v: expected torch.float32 or torch.*, got torch.int32", {"v": normal(1, 4, 2, 8).int()}),
    (CHUNK, ValueError, "v: expected at least 1 head, got 0", {"v": normal(1, 4, 0, 8)}),
    (CHUNK, ValueError, "v: expected a multiple or a divisor of the 3 heads of q, got 2", {"q": normal(1, 4, 3, 16)}),
    (CHUNK, ValueError, "g: expected shape .batch=1, tokens=4, HV=4.", {"q": normal(1, 4, 4, 16), "k": TWO_KEYS}),
    (CHUNK, TypeError, "outputfinal_state: expected no argument of this name", {"outputfinal_state": True}),
    (CHUNK, ValueError, "head_first: expected False, the only meaning that is offered, got True", {"head_first": True}),
    (ROW, ValueError, "gk: expected None, the only meaning that is offered, got Tensor", {"gk": normal(1, 4, 2, 16)}),
    (ROW, ValueError, "ssm_state_indices: expected None, as output_final", {"output_final_state": False}),
    (ROW, ValueError, "state_v_first: expected True, as output_final", {"state_v_first": False}),
    (CHUNK, ValueError, "v: expected V of 1..256, got 257", {"v": normal(1, 4, 2, 257)}),
    (CHUNK, ValueError, "g: expected shape .batch=1, tokens=4, HV=2.", {"g": normal(4, 2)}),
    (CHUNK, TypeError, "beta: expected a tensor, got NoneType", {"beta": None}),
    (CHUNK, TypeError, "g: expected a tensor, got NoneType", {"g": None}),
    (UPDATE, TypeError, "a: expected a tensor, got NoneType", {"a": None}),
    (CHUNK, TypeError, "scale: expected a number, got True", {"scale": True}),
    (CHUNK, TypeError, "scale: expected a number, got Tensor", {"scale": normal(4)}),
    (CHUNK, TypeError, "use_qk_l2norm_in_kernel: expected True or False, got Tensor", {FLAG: ints(0)}),
    (ROW, TypeError, "use_qk_l2norm_in_kernel: expected True or False, got None", {FLAG: None}),
    (UPDATE, TypeError, "use_qk_l2norm_in_kernel: expected True or False, got Tensor", {FLAG: ints(0)}),
    (CHUNK, TypeError, "output_final_state: expected True or False, got Tensor", {"output_final_state": ints(0)}),
    (ROW, TypeError, "output_final_state: expected True or False, got 1", {"output_final_state": 1}),
    (ROW, TypeError, "inplace_final_state: expected True or False, got Tensor", {"inplace_final_state": ints(1)}),
    (CHUNK, TypeError, "state_v_first: expected True or False, got 1", {"state_v_first": 1}),
    (CHUNK, TypeError, "transpose_state_layout: expected True or False, got 1", {"transpose_state_layout": 1}),
    (CHUNK, ValueError, "`chunk_size` must be 16, 32, or 64, got 128", {"chunk_size": 128}),
    (CHUNK, TypeError, "use_gate_in_kernel: expected True or False, got 1", {"use_gate_in_kernel": 1}),
    (ROW, TypeError, "A_log: expected a tensor", {"use_gate_in_kernel": True}),
    (ROW, ValueError, "allow_neg_eigval: expected False, as use_beta", {"allow_neg_eigval": True}),
    (ROW, ValueError, "core_attn_out: expected None, the only", {"core_attn_out": normal(1)}),
    (UPDATE, TypeError, "is_kda: expected True or False, got 1", {"is_kda": 1}),
    (UPDATE, ValueError, "lower_bound: expected None, as is_kda is False, got -5", {"lower_bound": -5.0}),
    (UPDATE, TypeError, "disable_state_update: expected True or False, got 1", {"disable_state_update": 1}),
    (UPDATE, ValueError, "cache_ring: expected False, the only", {"cache_ring": True}),
    (UPDATE, ValueError, "match_cutedsl_decode: expected False, the only", {"match_cutedsl_decode": True}),
    (UPDATE, ValueError, "replayssm_g: expected None, the only", {"replayssm_g": normal(9, 2, 4)}),
    (UPDATE, ValueError, "intermediate_states_buffer: expected None", {"intermediate_states_buffer": normal(9)}),
    (UPDATE, ValueError, "retrieve_parent_token: expected None, the only", {"retrieve_parent_token": table([1, 2])}),
    (UPDATE, TypeError, "head_first: expected no argument of this name", {"head_first": False}),
    (CHUNK, ValueError, "scale: expected a finite number above 0, got -1", {"scale": -1}),
    (ROW, ValueError, "scale: expected a finite number above 0, got nan", {"scale": float("nan")}),
    (CHUNK, ValueError, "initial_state: expected shape .N=2, HV=2, V=8, K=16.", {"initial_state": normal(2, 2, 16, 8)}),
    (CHUNK, TypeError, "cu_seqlens: expected torch.int32 or torch.int64", {"cu_seqlens": normal(3)}),
    (CHUNK, ValueError, "cu_seqlens: expected at least 1 rows, got 0", {"cu_seqlens": ints()}),
    (CHUNK, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(0, 3, 2)}),
    (CHUNK, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(-1, 3, 4)}),
    (ROW, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(0, 3, 5)}),
    (ROW, TypeError, "initial_state: expected a tensor, got None", {"initial_state": None}),
    (ROW, ValueError, "initial_state: expected shape .lines, HV=2", {"initial_state": normal(9, 1, 8, 16)}),
    (
        ROW,
        ValueError,
        "initial_state: expected states that are packed",
        {"initial_state": normal(9, 2, 16, 8).transpose(2, 3)},
    ),
    (ROW, ValueError, "initial_state: expected shape .lines=2", {"ssm_state_indices": None}),
    (ROW, ValueError, "inplace_final_state: expected True", {"inplace_final_state": False}),
    (ROW, ValueError, "ssm_state_indices: expected shape .rows.", {"ssm_state_indices": ints(1, 2)[None, None]}),
    (ROW, ValueError, "ssm_state_indices: expected at least 2 rows, got 1", {"ssm_state_indices": ints(1)}),
    (ROW, ValueError, "ssm_state_indices: expected slots below 9, got 9", {"ssm_state_indices": ints(1, 9)}),
    (ROW, ValueError, "ssm_state_indices: expected no slot that two rows write", {"ssm_state_indices": ints(1, 1)}),
    (ROW, ValueError, "num_accepted_tokens: expected None, as ssm_", {"num_accepted_tokens": ints(1, 1)}),
    (TABLE, ValueError, "num_accepted_tokens: expected at least 2 rows", {"num_accepted_tokens": ints(1)}),
    (TABLE, ValueError, "ssm_state_indices: expected at least 1 columns", {"ssm_state_indices": table([], [])}),
    (TABLE, ValueError, "cu_seqlens: expected rows of at most 1 tokens, got 3", {"ssm_state_indices": table([1], [2])}),
    (TABLE, ValueError, "ssm_state_indices: expected slots below", {"ssm_state_indices": table([1, 2, 3], [11, 5, 6])}),
    (TABLE, ValueError, "ssm_state_indices: expected no slot that", {"ssm_state_indices": table([1, 2, 3], [3, 5, 6])}),
    (TABLE, ValueError, "ssm_state_indices: expected no slot that", {"ssm_state_indices": table([1, 2, 3], [4, 3, 6])}),
    (UPDATE, TypeError, "softplus_beta: expected a number, got None", {"softplus_beta": None}),
    (UPDATE, ValueError, "softplus_beta: expected a finite number above 0, got 0", {"softplus_beta": 0}),
    (UPDATE, TypeError, "softplus_threshold: expected a number", {"softplus_threshold": "20"}),
    (UPDATE, ValueError, "A_log: expected shape .HV=2.", {"A_log": normal(3)}),
    (UPDATE, ValueError, "a: expected shape .batch . tokens=4, HV=2.", {"a": normal(3, 2)}),
    (UPDATE, ValueError, "b: expected shape .batch=1, tokens=4, HV=2.", {"b": normal(1, 3, 2)}),
    (UPDATE, TypeError, "initial_state_source: expected a tensor, got None", {"initial_state_source": None}),
    (UPDATE, ValueError, "initial_state_indices: expected shape .rows.", {"initial_state_indices": table([1], [2])}),
    (UPDATE, ValueError, "initial_state_indices: expected slots below 9, got", {"initial_state_indices": ints(12, 1)}),
]


@pytest.mark.parametrize(("function", "error", "message", "change"), WRONG, ids=[message for _, _, message, _ in WRONG])
def test_the_wrong_argument_is_named(
    function: Any, error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    path = Path("cpu", torch.float32)
    if function is CHUNK:
        good = good_chunk(path, Case([3, 1]))
    elif function is UPDATE:
        good = good_update(path, Case([3, 1], [4, 1]))
    else:
        table = Case([3, 1], [[4, 1, 7], [2, 5, 0]], [1, 2])
        good = good_rows(path, table if function is TABLE else Case([3, 1], [4, 1]))
    run = ROW if function is TABLE else function
    run(**good)
    states = good["initial_state_source" if function is UPDATE else "initial_state"]
    before = states.clone()
    with pytest.raises(error, match="^" + message):
        run(**(good | change))
    assert torch.equal(states, before)


def test_arguments_that_change_nothing_are_accepted() -> None:
    """Those of fla's, FlashQLA's and transformers' calls."""
    told = good_chunk(Path("cpu", torch.float32), Case([3, 1]))
    of_models: dict[str, Any] = {
        "use_cache": True,
        "output_attentions": False,
        "output_hidden_states": None,
        "max_length_q": 3,
    }
    of_fla: dict[str, Any] = {
        "chunk_size": 32,
        "cu_seqlens_cpu": told["cu_seqlens"],
        "head_first": False,
        "cp_context": None,
    }
    for function in (CHUNK, ROW):
        want, _ = function(**told, output_final_state=True)
        got, _ = function(**told, output_final_state=True, **of_models, **of_fla)
        assert torch.equal(got, want)
    rows = good_update(Path("cpu", torch.float32), Case([3, 1], [4, 1]))
    of_sglang: dict[str, Any] = {"is_kda": False, "disable_state_update": False, "cache_steps": 4}
    of_sglang |= {"cache_ring": False, "match_cutedsl_decode": False}
    of_sglang |= dict.fromkeys(("lower_bound", "intermediate_states_buffer", "retrieve_parent_token"))
    of_sglang |= dict.fromkeys(("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta"))
    states = rows.pop("initial_state_source")
    want = UPDATE(initial_state_source=states.clone(), **rows)
    assert torch.equal(UPDATE(initial_state_source=states, **rows, **of_sglang), want)


@pytest.mark.parametrize("function", [CHUNK, ROW, chunk_kda, fused_recurrent_kda], ids=lambda f: f.__name__)
def test_the_older_name_of_the_order_warns_and_does_not_stand_beside_the_new_one(function: Any) -> None:
    told = good_chunk(Path("cpu", torch.float32), Case([3, 1]))
    if function not in (CHUNK, ROW):
        told["g"] = -normal(1, 4, 2, 16).abs()
    del told["initial_state"]
    for v_first in (True, False):
        want = function(**told, output_final_state=True, state_v_first=v_first)
        for beside in ({}, {"state_v_first": False}):
            with pytest.warns(DeprecationWarning, match="^transpose_state_layout is now") as caught:
                got = function(**told, output_final_state=True, transpose_state_layout=v_first, **beside)
            assert caught[0].filename == __file__
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
        with pytest.raises(ValueError, match=r"^transpose_state_layout: expected None, as state_v_first is True, got"):
            function(**told, state_v_first=True, transpose_state_layout=v_first)


def test_a_batch_beside_offsets_is_refused() -> None:
    good = good_rows(Path("cpu", torch.float32), Case([2] * 2, [4, 1], dense=True))
    with pytest.raises(ValueError, match=r"^q: expected a batch of 1, as cu_seqlens is given, got 2"):
        ROW(**(good | {"cu_seqlens": ints(0, 2, 4)}))
    with pytest.raises(ValueError, match=r"^ssm_state_indices: expected at least 2 columns, got 1"):
        ROW(**(good | {"ssm_state_indices": ints(4, 1)[:, None]}))


def test_what_is_said_of_skipped_rows_is_not_checked() -> None:
    good = good_rows(Path("cpu", torch.float32), Case([3, 0, 2], [[4, -1, 99], [99, 99, 99], [2, 5, 99]], [1, 9, 1]))
    o, _ = ROW(**good)
    assert not o[:, :3].any() and o[:, 3:].any()
