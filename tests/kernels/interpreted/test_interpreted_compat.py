"""The tests of the engines' functions again: the Triton kernels in Triton's interpreter, on CPU tensors.

Of the gated delta rule some: a token of one head takes the interpreter milliseconds.
"""

from __future__ import annotations

import kernels.compat.test_compat_conv1d as convolution
import kernels.compat.test_compat_delta_tokens as tokens
import kernels.compat.test_compat_gated_delta as checks
import pytest
import torch
from kernels.compat.test_compat_conv1d import (
    test_a_row_without_an_index_has_the_line_of_its_number,
    test_indices_may_be_int64,
    test_lines_may_be_a_column_of_a_table,
    test_offsets_behind_the_last_row_are_not_read,
    test_out_may_be_new_or_strided_or_x,
)
from kernels.compat.test_compat_conv1d import (
    test_x_is_rounded_to_the_dtype_of_the_states as check_rounding,
)
from kernels.compat.test_compat_conv1d_package import (
    test_a_batch_is_as_many_packed_sequences,
    test_numbers_of_tokens_tell_the_sequences_of_a_batch,
    test_states_of_a_batch_go_in_and_come_out,
)
from rigs.kernels.delta_calls import Case, good_chunk, good_rows
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import rows
from deltaline_kernels.compat.delta_rule import sequences


@pytest.mark.parametrize("case", convolution.PREFILLS)
def test_fn_matches_the_reference(exact_path: InterpretedPath, case: str) -> None:
    convolution.test_fn_matches_the_reference(exact_path, case)


@pytest.mark.parametrize("case", ["decode", "padding", "several-tokens", "many-tokens", "speculative", "other-lines"])
def test_update_matches_the_reference(exact_path: InterpretedPath, case: str) -> None:
    convolution.test_update_matches_the_reference(exact_path, case)


@pytest.mark.parametrize(("case", "bounded"), convolution.RAGGED)
def test_update_of_ragged_rows_matches_the_reference(exact_path: InterpretedPath, case: str, bounded: bool) -> None:
    convolution.test_update_of_ragged_rows_matches_the_reference(exact_path, case, bounded)


@pytest.mark.parametrize("wide_states", [True, False], ids=["wide-states", "narrow-states"])
def test_x_is_rounded_to_the_dtype_of_the_states(wide_states: bool) -> None:
    """Not to bf16: the interpreter cuts where it should round."""
    dtypes = (torch.float16, torch.float32) if wide_states else (torch.float32, torch.float16)
    check_rounding("cpu", *dtypes)


@pytest.mark.parametrize(
    "name", ["tiles-apart", "empty-and-fresh", "dense-apart", "no-norm-and-a-scale", "states-of-fp16"]
)
def test_chunk_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_chunk_matches_the_reference(path, name)


@pytest.mark.parametrize("name", ["fresh"])
def test_recurrent_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_recurrent_matches_the_reference(path, name)


@pytest.mark.parametrize("name", ["several-tokens-at-once", "decode", "several-tokens", "padding", "grouped-heads"])
def test_recurrent_of_slots_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_recurrent_of_slots_matches_the_reference(path, name)


@pytest.mark.parametrize("name", ["ragged", "padding-for-a-token", "wider-than-the-rows", "counts-out-of-range"])
def test_recurrent_of_a_table_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_recurrent_of_a_table_matches_the_reference(path, name)


@pytest.mark.parametrize("name", ["decode", "another-softplus"])
def test_sigmoid_update_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_sigmoid_update_matches_the_reference(path, name, flat=True)


@pytest.mark.parametrize("wide", ["qk", "v"])
def test_tokens_of_several_dtypes_are_computed_in_fp32(exact_path: InterpretedPath, wide: str) -> None:
    tokens.test_tokens_of_several_dtypes_are_computed_in_fp32(exact_path, wide)


def test_more_query_heads_share_keys_and_values(exact_path: InterpretedPath) -> None:
    tokens.test_more_query_heads_share_keys_and_values(exact_path)


def test_a_sequence_goes_on_as_fla_calls_it(exact_path: InterpretedPath) -> None:
    tokens.test_a_sequence_goes_on_as_fla_calls_it(exact_path, v_first=False)


def test_a_row_too_long_for_its_table_is_skipped(exact_path: InterpretedPath) -> None:
    checks.check_row_too_long_for_its_table(exact_path)


def test_whole_sequences_go_in_chunks_and_next_tokens_one_by_one(
    path: InterpretedPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results don't tell: they are the same but for rounding."""
    from deltaline_kernels.gated_delta import launch

    seen = []
    for name in ("launch_recurrent", "launch_exact_chunk", "launch_chunk"):
        monkeypatch.setattr(launch, name, lambda *args, name=name: seen.append((name, args[2].num_rows)))
    chunks = "launch_exact_chunk" if path.dtype == torch.float32 else "launch_chunk"
    checks.CHUNK(**good_chunk(path, Case([3, 1])))
    assert seen == [("launch_recurrent", 0), (chunks, 2)]
    seen.clear()
    checks.ROW(**good_rows(path, Case([3, 1], [4, 1])))
    assert seen == [("launch_recurrent", 2), (chunks, 0)]
