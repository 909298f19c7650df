"""What the engines' functions refuse of states and of slots, and what they launch for those that they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import kernels.compat.test_compat_mamba2 as mamba
import pytest
import torch
from rigs.kernels.compiled import compile_launches
from rigs.kernels.delta_calls import NUM_SLOTS, Case, good_rows, good_update, table
from rigs.kernels.draws import ints, normal
from rigs.kernels.paths import Path

from deltaline_kernels.compat import (
    fused_recurrent_gated_delta_rule,
    fused_sigmoid_gating_delta_rule_update,
    selective_state_update,
)

HALF, BF16 = torch.float16, torch.bfloat16


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
def test_a_table_is_one_launch_behind_that_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their tokens are, compiled for a Hopper GPU, with pools that lie apart and of two dtypes."""
    pytest.importorskip("triton")

    def launched(call: Callable[[], object]) -> list[str]:
        return [kernel.metadata.name for kernel in compile_launches(monkeypatch, call)]

    slots, targets = (torch.zeros(2, 3, dtype=torch.int32, device="meta") for _ in range(2))
    pool = torch.empty(5, 2 * 16 * 16 + 4, dtype=HALF, device="meta")[:, :-4].unflatten(1, (2, 16, 16))
    final = torch.empty(9, 2, 16, 16, device="meta")
    counts = torch.ones(2, dtype=torch.int32, device="meta")
    q, k, v = torch.empty(3, 1, 6, 2, 16, dtype=BF16, device="meta")
    g, beta = torch.empty(2, 1, 6, 2, device="meta")
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    told: dict[str, Any] = {"initial_state": pool, "ssm_state_indices": slots, "num_accepted_tokens": counts}
    told |= {"cu_seqlens": starts, "output_state_indices": targets, "final_state": final}
    names = launched(partial(fused_recurrent_gated_delta_rule, q, k, v, g, beta, **told))
    assert names == ["_build_with_tokens", "_recurrent"]

    x, dt = torch.empty(6, 2, 16, dtype=BF16, device="meta"), torch.empty(6, 2, device="meta")[..., None]
    B, C = torch.empty(2, 6, 1, 16, dtype=BF16, device="meta")
    A = torch.empty(2, device="meta")[:, None, None].expand(2, 16, 16)
    told = {"state_batch_indices": slots, "num_accepted_tokens": counts, "cu_seqlens": starts, "final_state": final}
    call = partial(selective_state_update, pool, x, dt.expand(6, 2, 16), A, B, C, **told)
    assert launched(call) == ["_build_with_tokens", "_recurrent"]


def test_states_and_slots_are_named_when_they_are_wrong() -> None:
    path = Path("cpu", torch.float32)
    row, update = good_rows(path, Case([3, 1], [4, 1])), good_update(path, Case([3, 1], [4, 1]))
    kept = good_rows(path, Case([3, 1], [[4, 1, 7], [2, 5, 0]], [1, 2]))
    pool, slots = row["initial_state"], ints(2, 3)
    turned = pool.transpose(2, 3).contiguous().transpose(2, 3)
    wrong: list[tuple[Any, dict[str, Any], str, dict[str, Any]]] = [
        (fused_recurrent_gated_delta_rule, row, "final_state: expected shape", {"final_state": pool[:, :1]}),
        (
            fused_recurrent_gated_delta_rule,
            row,
            "final_state: expected states that are packed",
            {"final_state": turned},
        ),
        (
            fused_recurrent_gated_delta_rule,
            row,
            "final_state: expected states that are packed",
            {"final_state": pool[:1].expand(NUM_SLOTS, -1, -1, -1)},
        ),
        (
            fused_recurrent_gated_delta_rule,
            row,
            "output_state_indices: expected no slot that one row reads and another writes, got slot 1",
            {"final_state": pool, "output_state_indices": ints(1, 2)},
        ),
        (
            fused_recurrent_gated_delta_rule,
            row,
            "output_state_indices: expected None, as ssm_state_indices",
            {"ssm_state_indices": None, "output_state_indices": slots, "initial_state": None},
        ),
        (
            fused_recurrent_gated_delta_rule,
            row,
            "final_state: expected None, as output_final_state",
            {"ssm_state_indices": None, "output_final_state": True, "final_state": pool},
        ),
        (
            fused_recurrent_gated_delta_rule,
            kept,
            r"output_state_indices: expected shape",
            {"output_state_indices": slots},
        ),
        (
            fused_recurrent_gated_delta_rule,
            kept,
            "cu_seqlens: expected rows of at most 2 tokens, got 3",
            {"output_state_indices": table([4, 1], [2, 5])},
        ),
        *(
            (function, good, f"output_state_indices: expected {what}", {"output_state_indices": ints(*values)})
            for function, good in (
                (fused_recurrent_gated_delta_rule, row),
                (fused_sigmoid_gating_delta_rule_update, update),
            )
            for what, values in (
                ("slots below 9, got 9", [2, 9]),
                ("no slot that two rows write", [2, 2]),
                ("no slot that one row reads", [1, 2]),
                ("at least 2 rows", [2]),
            )
        ),
    ]
    for function, good, message, change in wrong:
        with pytest.raises(ValueError, match=f"^{message}"):
            function(**(good | change))
    _, told = mamba.make_call(mamba.CASES["without-indices"], path)
    state = normal(3, 2, 8, 16)
    for message, change in (
        ("dst_state_batch_indices: expected None, as state_batch_indices", {"dst_state_batch_indices": slots}),
        ("num_accepted_tokens: expected None, as state_batch_indices", {"num_accepted_tokens": slots}),
        ("final_state: expected at least 3 slots", {"final_state": state[:2].clone()}),
        ("final_state: expected shape", {"final_state": state[:, :1]}),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            selective_state_update(state, **(told | change))
