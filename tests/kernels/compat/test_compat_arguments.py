"""What the engines' convolution says of wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.compat.test_compat_conv1d import DIM, NUM_LINES
from rigs.kernels.draws import ints, normal

from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states


def good_prefill() -> dict[str, Any]:
    return {
        "x": normal(5, DIM).t(),
        "weight": normal(DIM, 4),
        "bias": normal(DIM),
        "conv_states": normal(NUM_LINES, 3, DIM).transpose(1, 2),
        "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cache_indices": torch.tensor([1, 2], dtype=torch.int32),
        "has_initial_state": torch.tensor([True, False]),
        "validate_data": True,
    }


def good_update() -> dict[str, Any]:
    return {
        "x": normal(2, 3, DIM).transpose(1, 2),
        "conv_state": normal(NUM_LINES, 5, DIM).transpose(1, 2),
        "weight": normal(DIM, 4),
        "conv_state_indices": torch.tensor([1, 2], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=torch.int32),
        "validate_data": True,
    }


def good_batch() -> dict[str, Any]:
    numbers = torch.tensor([[0, 0, 1], [1, 2, -1]])
    return {"x": normal(2, DIM, 3), "weight": normal(DIM, 4), "initial_states": normal(2, DIM, 3), "seq_idx": numbers}


def blocks(table: list[list[int]], read: list[int]) -> dict[str, Any]:
    written = {"initial_state_idx": ints(*read), "block_idx_last_scheduled_token": ints(1, 1)}
    return {"conv_state_indices": torch.tensor(table), **written}


def good_packed() -> dict[str, Any]:
    return {"x": normal(5, DIM), "cu_seqlens": ints(0, 3, 5), "state_len": 4}


FN, UPDATE, STATES = causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
BATCH: Any = "a call of causal_conv1d_fn with a batch"
WRONG: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
    (FN, TypeError, "x: expected a tensor, got list", {"x": [1.0]}),
    (FN, ValueError, "x: expected shape", {"x": normal(DIM)}),
    (FN, ValueError, "x: expected contiguous channels", {"x": normal(DIM, 5)}),
    (FN, ValueError, "weight: expected shape .dim=24, width., got .4, 24.", {"weight": normal(4, DIM)}),
    (FN, ValueError, "weight: expected a width of 2..6, got 7", {"weight": normal(DIM, 7)}),
    (FN, ValueError, "bias: expected shape", {"bias": normal(DIM - 1)}),
    (FN, ValueError, "bias: expected a contiguous", {"bias": normal(DIM, 2)[:, 0]}),
    (FN, ValueError, "conv_states: expected the channels", {"conv_states": normal(NUM_LINES, DIM, 6)[:, :, ::2]}),
    (
        FN,
        ValueError,
        "conv_states: expected the channels",
        {"conv_states": normal(1, DIM, 3).expand(NUM_LINES, -1, -1)},
    ),
    (FN, ValueError, "conv_states: expected at least", {"conv_states": normal(NUM_LINES, 2, DIM).transpose(1, 2)}),
    (
        FN,
        ValueError,
        "conv_states: expected at least 2 lines",
        {"cache_indices": None, "conv_states": normal(1, 3, DIM).transpose(1, 2)},
    ),
    (FN, TypeError, "query_start_loc: expected torch.int32", {"query_start_loc": normal(3)}),
    (FN, ValueError, "query_start_loc: expected at least 1", {"query_start_loc": ints()}),
    (FN, ValueError, "query_start_loc: expected offsets", {"query_start_loc": ints(0, 3, 2)}),
    (FN, ValueError, "cache_indices: expected at least 2", {"cache_indices": ints(1)}),
    (FN, ValueError, "cache_indices: expected lines below 9, got 9", {"cache_indices": ints(9, 1)}),
    (FN, ValueError, "cache_indices: expected no line that two", {"cache_indices": ints(1, 1)}),
    (FN, TypeError, "has_initial_state: expected torch.bool", {"has_initial_state": ints(1, 0)}),
    (FN, ValueError, "has_initial_state: expected None", {"conv_states": None}),
    (FN, ValueError, "has_initial_state: expected at least 2", {"has_initial_state": torch.tensor([True])}),
    (FN, TypeError, "query_start_loc: expected a tensor, got None", {"query_start_loc": None}),
    (FN, ValueError, "query_start_loc: expected None beside", {"x": normal(2, DIM, 3)}),
    (FN, ValueError, "seq_idx: expected None or False, as packed", {"seq_idx": ints(0, 0, 0, 1, 1)}),
    (BATCH, ValueError, "seq_idx: expected None or False, as packed", {"conv_states": normal(2, DIM, 3)}),
    (BATCH, TypeError, "seq_idx: expected torch.int32 or torch.int64", {"seq_idx": normal(2, 3)}),
    (BATCH, ValueError, "seq_idx: expected shape .batch=2, tokens=3.", {"seq_idx": ints(0, 0, 0)}),
    (BATCH, ValueError, "return_final_states: expected False beside seq_idx", {"return_final_states": True}),
    (BATCH, ValueError, "final_states_out: expected None, as return_final", {"final_states_out": normal(2, DIM, 3)}),
    (BATCH, ValueError, "initial_states: expected shape .batch=2, dim=24,", {"initial_states": normal(2, DIM, 4)}),
    (BATCH, ValueError, "cache_indices: expected None, as conv_states", {"cache_indices": ints(1, 2)}),
    (BATCH, ValueError, "has_initial_state: expected None", {"has_initial_state": torch.tensor([True, False])}),
    (FN, ValueError, "initial_states: expected None or False, as conv", {"initial_states": normal(2, DIM, 3)}),
    (FN, ValueError, "return_final_states: expected None or False", {"return_final_states": True}),
    (FN, ValueError, "final_states_out: expected None or False", {"final_states_out": normal(2, DIM, 3)}),
    (UPDATE, ValueError, "num_accepted_tokens: expected None beside", {"cache_seqlens": ints(1, 1)}),
    (UPDATE, TypeError, "cache_seqlens: expected", {"cache_seqlens": 5, "num_accepted_tokens": None}),
    (UPDATE, ValueError, "cache_seqlens: expected", {"cache_seqlens": ints(1), "num_accepted_tokens": None}),
    (FN, TypeError, "return_final_states: expected True or False, got Tensor", {"return_final_states": ints(1)}),
    (FN, TypeError, "seq_lens: expected no argument of this name", {"seq_lens": [3, 2]}),
    (FN, ValueError, "num_computed_tokens: expected None, the only", {"num_computed_tokens": ints(3, 2)}),
    (UPDATE, ValueError, "num_accept_tokens: expected None beside num_acc", {"num_accept_tokens": ints(1, 1)}),
    (UPDATE, ValueError, "intermediate_conv_window: expected None", {"intermediate_conv_window": normal(2, 3)}),
    (UPDATE, ValueError, "retrieve_next_token: expected None, the only", {"retrieve_next_token": ints(1, 1)}),
    (FN, ValueError, "activation: expected", {"activation": "relu"}),
    (FN, ValueError, "activation: expected .* got Tensor", {"activation": torch.tensor([True, False])}),
    (UPDATE, ValueError, "x: expected shape .batch, dim.", {"x": normal(DIM)}),
    (UPDATE, ValueError, "x: expected shape .tokens, dim.", {"query_start_loc": ints(0, 3, 6)}),
    (UPDATE, ValueError, "conv_state: expected at least", {"conv_state": normal(NUM_LINES, 4, DIM).transpose(1, 2)}),
    (UPDATE, ValueError, "conv_state_indices: expected at least 2 rows", {"conv_state_indices": ints(1)}),
    (UPDATE, ValueError, "num_accepted_tokens: expected counts of 0..3", {"num_accepted_tokens": ints(1, 4)}),
    (UPDATE, ValueError, "num_accepted_tokens: expected at least 2", {"num_accepted_tokens": ints(1)}),
    (UPDATE, ValueError, "conv_state_indices: expected a table", {"initial_state_idx": ints(0, 0)}),
    (
        UPDATE,
        ValueError,
        "block_idx_last_scheduled_token: expected a tensor",
        {"conv_state_indices": ints(1, 2)[:, None], "initial_state_idx": ints(0, 0)},
    ),
    (UPDATE, ValueError, "conv_state_indices: expected no line that one row reads", blocks([[1, 2], [3, 1]], [0, 0])),
    (
        UPDATE,
        ValueError,
        "max_query_len: expected at least 2",
        {"x": normal(3, DIM), "query_start_loc": ints(0, 2, 3), "max_query_len": 1},
    ),
    (UPDATE, ValueError, "initial_state_idx: expected blocks of 0..1, got .2, 0.", blocks([[1, 2], [3, 4]], [2, 0])),
    (
        UPDATE,
        ValueError,
        "conv_state_indices: expected at least one block",
        {"conv_state_indices": torch.zeros(2, 0, dtype=torch.int32)},
    ),
    (FN, TypeError, "pad_slot_id: expected an integer, got None", {"pad_slot_id": None}),
    (UPDATE, TypeError, "null_block_id: expected an integer, got 'x'", {"null_block_id": "x"}),
    (UPDATE, TypeError, "max_query_len: expected an integer, got None", {"max_query_len": None}),
    (FN, ValueError, "query_start_loc: expected offsets", {"query_start_loc": ints(0, 3, 9), "validate_data": False}),
    (UPDATE, ValueError, "out: expected shape", {"out": normal(2, DIM)}),
    (STATES, ValueError, "x: expected shape .tokens, dim.", {"x": normal(2, DIM, 3)}),
    (STATES, TypeError, "cu_seqlens: expected torch.int32", {"cu_seqlens": normal(3)}),
    (STATES, ValueError, "cu_seqlens: expected at least 1", {"cu_seqlens": ints()}),
    (STATES, ValueError, "cu_seqlens: expected offsets that rise", {"cu_seqlens": ints(0, 3, 6)}),
    (STATES, ValueError, "state_len: expected", {"state_len": 0}),
]


@pytest.mark.parametrize(("function", "error", "message", "change"), WRONG, ids=[message for _, _, message, _ in WRONG])
def test_the_wrong_argument_is_named(
    function: Any, error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    good = {FN: good_prefill, UPDATE: good_update, BATCH: good_batch, STATES: good_packed}[function]()
    run: Callable[..., Any] = FN if function is BATCH else function
    run(**good)
    with pytest.raises(error, match="^" + message):
        run(**(good | change))


def test_arguments_that_change_nothing_are_accepted() -> None:
    """Those of SGLang's calls, and of the calls of vLLM's older releases; compiled, too."""
    of_prefill: dict[str, Any] = {"seq_lens_cpu": [3, 2], "block_table": None, "block_size_to_align": 0}
    of_prefill |= dict.fromkeys(("block_idx_first_scheduled_token", "num_computed_tokens", "initial_state_idx"))
    of_update: dict[str, Any] = dict.fromkeys(
        ("num_accept_tokens", "intermediate_conv_window", "retrieve_parent_token")
    )
    of_update["intermediate_state_indices"] = ints(0, 1)
    for function, good, unused in ((FN, good_prefill, of_prefill), (UPDATE, good_update, of_update)):
        told = good() | {"validate_data": False}
        want = function(**{name: told[name].clone() if name.startswith("conv_state") else told[name] for name in told})
        got = torch.compile(function, fullgraph=True, backend="eager")(**told, **unused)
        assert torch.equal(got, want)


def test_accepted_tokens_have_another_name(device: str) -> None:
    """SGLang's; compiled, too."""
    good = good_update().items()
    told: dict[str, Any] = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in good}
    other = told | {"num_accepted_tokens": None, "num_accept_tokens": told["num_accepted_tokens"]}
    for run in (UPDATE, torch.compile(UPDATE, fullgraph=True, backend="eager")):
        states = [told["conv_state"].clone() for _ in range(2)]
        got, want = run(**(other | {"conv_state": states[0]})), UPDATE(**(told | {"conv_state": states[1]}))
        assert torch.equal(got, want) and torch.equal(*states)


def test_what_is_said_of_skipped_rows_is_not_checked() -> None:
    told = good_update() | {"num_accepted_tokens": ints(99, 2), "conv_state_indices": ints(-1, 2)}
    assert (causal_conv1d_update(**told)[0] == 0).all()


@pytest.mark.parametrize("lines", [[3], [5, 6], [2, 3]])
def test_on_the_cpu_a_line_out_of_range_is_refused_without_validation(lines: list[int]) -> None:
    """Lines that follow each other are a slice, of which what is too much would be left out without a word."""
    states = torch.zeros(3, 3, DIM).transpose(1, 2)
    x, weight = torch.randn(2 * len(lines), DIM).t(), torch.randn(DIM, 4)
    starts = torch.arange(0, 2 * len(lines) + 1, 2, dtype=torch.int32)
    indices = torch.tensor(lines, dtype=torch.int32)
    with pytest.raises(IndexError, match=f"indices: expected lines below 3, got {max(lines)}"):
        causal_conv1d_fn(x, weight, None, states, starts, cache_indices=indices, activation=None)
    assert not states.any()
    with pytest.raises(IndexError, match=f"indices: expected lines below 3, got {max(lines)}"):
        causal_conv1d_update(torch.randn(len(lines), DIM), states, weight, conv_state_indices=indices)
    assert not states.any()
