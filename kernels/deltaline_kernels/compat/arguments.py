"""The rows of a call as engines pass them, and the validation of arguments: dtypes, devices, shapes and strides, never
contents.

Every failure is a TypeError or a ValueError that names the argument, what was expected and what was got, with the
dimensions in the engines' order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_CONV_WIDTH, MIN_CONV_WIDTH

INTEGERS = (torch.int32, torch.int64)


class Unused(TypedDict, total=False):
    """Arguments by name that vLLM, SGLang, fla, FlashQLA and transformers pass to a delta rule; they change nothing.

    Those whose annotation is in NEUTRAL change nothing if they have the value there, or None.
    """

    # How it is computed.
    chunk_indices: Tensor | None
    chunk_offsets: Tensor | None
    cu_seqlens_cpu: Tensor | None
    auto_cp: bool
    enable_fwd_cp_cache: bool
    # What transformers passes on from the call of the model.
    use_cache: bool | None
    output_attentions: bool | None
    output_hidden_states: bool | None
    output_router_logits: bool | None
    num_items_in_batch: Tensor | int | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    position_ids: Tensor | None
    seq_idx: Tensor | None
    is_causal: bool | None
    # Other meanings of the arguments.
    head_first: Literal[False]
    gk: None
    gv: None
    cp_context: None


class UnusedRows(Unused, total=False):
    """Likewise, to one that takes token by token."""

    chunk_size: int
    # Other meanings of the arguments.
    core_attn_out: None


class UnusedKda(Unused, total=False):
    """Likewise, to KDA in chunks."""

    use_graph: bool
    max_num_seqs: int | None
    # Other meanings of the arguments.
    core_attn_out: None
    track_state: None
    track_chunk_idx: None


class UnusedSteps(TypedDict, total=False):
    """Arguments by name that vLLM and SGLang pass to the update of a recurrence; as `Unused`."""

    # How it is computed.
    is_blackwell: bool
    cache_philox_rounds: int
    # Other meanings of the arguments.
    enable_stochastic_rounding: Literal[False]
    retrieve_parent_token: None


class UnusedMambaSteps(UnusedSteps, total=False):
    """Likewise, to that of Mamba, and FlashInfer's."""

    # How it is computed.
    algorithm: str
    backend: str
    philox_rounds: int
    # Other meanings of the arguments.
    state_scale: None
    intermediate_state_scales: None
    rand_seed: None


class UnusedDeltaSteps(UnusedSteps, total=False):
    """Likewise, to that of the delta rules."""

    # How it is computed.
    cache_steps: int | None
    # Other meanings of the arguments.
    cache_ring: Literal[False]
    replayssm_rawv: None
    replayssm_rawk: None
    replayssm_g: None
    replayssm_beta: None
    match_cutedsl_decode: Literal[False]
    intermediate_states_buffer: None
    intermediate_state_indices: None


class UnusedScan(TypedDict, total=False):
    """Arguments by name that vLLM passes to the scan of sequences; as `Unused`."""

    # How it is computed.
    block_size: int
    cu_chunk_seqlen: Tensor | None
    last_chunk_indices: Tensor | None
    # Other meanings of the arguments.
    block_idx_first_scheduled_token: None
    block_idx_last_scheduled_token: None
    initial_state_idx: None


class UnusedConv(TypedDict, total=False):
    """Arguments by name that SGLang and older releases of vLLM pass to the convolution of sequences; as `Unused`."""

    # How it is computed.
    seq_lens_cpu: Any
    block_table: Tensor | None
    block_size_to_align: int
    # Other meanings of the arguments.
    num_computed_tokens: None
    block_idx_first_scheduled_token: None
    block_idx_last_scheduled_token: None
    initial_state_idx: None


class UnusedConvSteps(TypedDict, total=False):
    """Arguments by name that SGLang passes to the convolution of next tokens; as `Unused`."""

    # How it is computed.
    metadata: Any
    # Where the windows of the steps would go.
    intermediate_state_indices: Tensor | None
    # Other meanings of the arguments.
    intermediate_conv_window: None
    retrieve_next_token: None
    retrieve_next_sibling: None
    retrieve_parent_token: None


class UnusedExperts(TypedDict, total=False):
    """Arguments by name that older releases of vLLM pass to the experts; as `Unused`."""

    # How it is computed.
    allow_deep_gemm: bool
    allow_cutlass_block_scaled_grouped_gemm: bool
    # Other meanings of the arguments.
    use_int8_w8a8: Literal[False]
    use_int8_w8a16: Literal[False]
    use_int4_w4a16: Literal[False]
    use_mxfp4_w4a4: Literal[False]
    per_channel_quant: Literal[False]
    ocp_mx_scheme: None
    w1_zp: None
    w2_zp: None
    w1_bias: None
    w2_bias: None
    clamp_limit: None


# What an argument of one meaning is.
NEUTRAL: Mapping[Any, Any] = {NoneType: None, Literal[False]: False}


def check_unused(unused: Mapping[str, Any], kind: type = Unused) -> None:
    """Check arguments that are accepted by name alone.

    Raises:
        TypeError: a name that is not one of `kind`.
        ValueError: a value with a meaning that is not offered.
    """
    for name, value in unused.items():
        if name not in kind.__annotations__:
            raise TypeError(f"{name}: expected no argument of this name")
        hint = kind.__annotations__[name]
        if hint in NEUTRAL and value is not None and value is not NEUTRAL[hint]:
            raise ValueError(
                f"{name}: expected {NEUTRAL[hint]}, the only meaning that is offered, got {describe(value)}"
            )


def describe(value: object) -> str:
    """Return how an error names an argument: its value, but of a tensor and the like the type."""
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


@dataclass(frozen=True, eq=False)
class EngineRows:
    """The rows of one call, their tensors on the device of the operands.

    Args:
        num_rows: rows; tensors may have more entries.
        longest: upper bound of the length of a row.
        length: tokens of every row, or 0 where `starts` tells.
        starts: `[num_rows + 1]` integers or None.
        read_line, write_line: `[num_rows]` integers of any stride, or None: row i has line i.
        pad: this entry of either, or one below 0, skips the row: its outputs are zero and no line is touched. With
            `moves` such a write_line means that nothing is written.
        history: whether rows begin behind what their line holds: `[num_rows]` bool, or one answer for all of them.
        num_accepted: `[num_rows]` integers, accepted tokens of the previous step, its first included; None where
            nothing is speculative.
        token_lines: `[num_rows, columns]` integers, the lines of the states after each token, or None. Then there is no
            write_line, and read_line is `[num_rows, columns]`: a row begins with its column num_accepted - 1, bounded
            to those that there are, or with its first. Such an entry skips the row as one of read_line does.
        moves: rows without tokens, too, write the states that they read.
        waypoints: as of `Rows`, of rows that are computed in chunks; None where there are none.
    """

    num_rows: int
    longest: int
    length: int
    starts: Tensor | None
    read_line: Tensor | None
    write_line: Tensor | None
    pad: int
    history: Tensor | bool
    num_accepted: Tensor | None
    token_lines: Tensor | None = None
    moves: bool = False
    waypoints: Tensor | None = None

    def most_states(self, num_tokens: int) -> int:
        """Return how many states a row of `num_tokens` tokens in all may leave: no row has more tokens."""
        assert self.token_lines is not None
        return self.length if self.starts is None else min(self.token_lines.shape[1], num_tokens)

    def most_tokens(self, columns: int, width: int) -> int | None:
        """Return how many tokens of a row fit a line, None for any number: drafts are all kept until the next step."""
        return None if self.num_accepted is None else columns - width + 2


def check_operand(
    name: str,
    tensor: Tensor | None,
    shape: Mapping[str, int | None],
    dtypes: Sequence[torch.dtype] = ACTIVATIONS,
    device: torch.device | None = None,
    beside: str | None = "x",
    *,
    contiguous: bool = False,
) -> Tensor:
    """Check and return one tensor argument, of any strides unless it shall be `contiguous`.

    Args:
        shape: the name of each dimension and its size, None for any.
        device: None for any. beside: the argument that is there too, if an error shall name it.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: device, shape or strides differ.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        reason = "" if beside is None else f" as {beside} has"
        raise ValueError(f"{name}: expected device {device}{reason}, got {tensor.device}")
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape.values(), sizes, strict=True)
    ):
        wanted = ", ".join(label if size is None else f"{label}={size}" for label, size in shape.items())
        raise ValueError(f"{name}: expected shape ({wanted}), got {sizes}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    return tensor


def check_indices(
    name: str,
    tensor: Tensor | None,
    device: torch.device,
    num_rows: int,
    dtypes: Sequence[torch.dtype] = INTEGERS,
    *,
    more: bool = False,
) -> Tensor:
    """Check and return a `(num_rows,)` tensor of integers; `more` accepts entries behind those, which are not read."""
    wanted = None if more else num_rows
    tensor = check_operand(name, tensor, {"rows": wanted}, dtypes, device)
    if tensor.shape[0] < num_rows:
        raise ValueError(f"{name}: expected at least {num_rows} entries, got {tensor.shape[0]}")
    return tensor


def check_integer(name: str, value: int) -> None:
    """Check a number of the host.

    Raises:
        TypeError: not an integer.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {describe(value)}")


def check_flag(name: str, value: bool) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")


def check_is(wanted: object, reason: str, **given: object) -> None:
    """Raise ValueError for an argument that is not `wanted`, None, True or False: all that it may be for a `reason`."""
    for name, value in given.items():
        if value is not wanted:
            got = "a tensor" if isinstance(value, Tensor) else describe(value)
            raise ValueError(f"{name}: expected {wanted}, {reason}, got {got}")


def parse_pad(pad_slot_id: int, null_block_id: int | None) -> int:
    """Return the index of padding rows besides those below 0: `null_block_id` where it is given."""
    check_integer("pad_slot_id", pad_slot_id)
    if null_block_id is None:
        return pad_slot_id
    check_integer("null_block_id", null_block_id)
    return null_block_id


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Raise TypeError unless `value` is a number of the host, ValueError if it should be `positive` and is not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if positive and not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")


def parse_bound(name: str, value: float | None) -> float | None:
    """Return None, or a finite number of the host of at most 0 as a float; raise TypeError or ValueError for others."""
    if value is None:
        return None
    check_number(name, value)
    if not -math.inf < value <= 0:
        raise ValueError(f"{name}: expected a finite number of at most 0, got {value}")
    return float(value)


def check_filter(weight: Tensor, bias: Tensor | None, dim: int, device: torch.device) -> None:
    """Check the filter of a convolution of `dim` channels."""
    check_operand("weight", weight, {"dim": dim, "width": None}, device=device)
    width = weight.shape[1]
    if not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"weight: expected a width of {MIN_CONV_WIDTH}..{MAX_CONV_WIDTH}, got {width}")
    if bias is not None:
        check_operand("bias", bias, {"dim": dim}, device=device)
        if dim > 1 and bias.stride(0) != 1:
            raise ValueError(f"bias: expected a contiguous tensor, got strides {bias.stride()}")


def check_states(name: str, states: Tensor, dim: int, width: int, device: torch.device) -> None:
    """Check `(lines, dim, columns)` states: channels or columns contiguous, lines apart at any distance."""
    check_operand(name, states, {"lines": None, "dim": dim, "columns": None}, device=device)
    lines, _, columns = states.shape
    if columns < width - 1:
        raise ValueError(f"{name}: expected at least width - 1 = {width - 1} columns, got {columns}")
    line_stride, channel_stride, column_stride = states.stride()
    by_column = (dim <= 1 or channel_stride == 1) and (columns <= 1 or column_stride >= dim)
    by_channel = (columns <= 1 or column_stride == 1) and (dim <= 1 or channel_stride >= columns)
    size = (dim - 1) * channel_stride + (columns - 1) * column_stride + 1
    if not (by_column or by_channel) or (lines > 1 and line_stride < size):
        raise ValueError(
            f"{name}: expected the channels of a column contiguous, as in states.transpose(1, 2) of a "
            "[lines, columns, dim] tensor, or the columns of a channel, and lines that don't overlap, "
            f"got strides {states.stride()}"
        )


def parse_activation(activation: bool | str | None) -> bool:
    """Return whether the activation is SiLU.

    Raises:
        ValueError: neither SiLU nor none.
    """
    if activation is True or activation in ("silu", "swish"):
        return True
    if activation is False or activation is None:
        return False
    raise ValueError(f"activation: expected True, 'silu', 'swish', False or None, got {describe(activation)}")
