"""Causal depthwise convolution as inference engines call it: `causal_conv1d_fn` and `causal_conv1d_update`.

`causal_conv1d_varlen_states` has the states of sequences alone.

Names, arguments and state layout are those of vLLM: channels first, states that are lines of a pool picked by index
tensors, a history that begins at column 0. Products and sums are fp32. Nothing waits for a GPU unless told to check the
contents.
"""

from functools import partial
from types import NoneType
from typing import Any, Unpack

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import (
    EngineRows,
    UnusedConv,
    UnusedConvSteps,
    check_filter,
    check_flag,
    check_indices,
    check_integer,
    check_is,
    check_operand,
    check_states,
    check_unused,
    parse_activation,
    parse_pad,
)
from deltaline_kernels.compat.conv1d.batch import convolve_batch
from deltaline_kernels.compat.conv1d.by_device import convolve
from deltaline_kernels.compat.conv1d.circles import take_turn
from deltaline_kernels.compat.conv1d.tokens import pack_columns, pack_tokens, pick_lines, unpack_columns, unpack_tokens
from deltaline_kernels.compat.rows import check_contents
from deltaline_kernels.operators import operator

# What does what an argument of causal-conv1d would.
INSTEAD = {
    "seq_idx": "packed sequences are told by query_start_loc",
    "initial_states": "conv_states and has_initial_state tell them",
    "return_final_states": "conv_states are left with the last tokens",
    "final_states_out": "conv_states are left with the last tokens",
}


def _fake_batch(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)


def _fake_fn(
    x: Tensor, weight: Tensor, return_final_states: bool, final_states_out: Tensor | None, **_: Any
) -> Tensor | tuple[Tensor, Tensor]:
    if x.ndim != 3:
        return unpack_columns(x.new_empty(x.shape[1], x.shape[0]), x)
    if not return_final_states:
        return _fake_batch(x)
    final = x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[1]).transpose(1, 2)
    return _fake_batch(x), final if final_states_out is None else final_states_out


def _fake_update(x: Tensor, out: Tensor | None, **_: Any) -> Tensor:
    if out is not None:
        return out
    return _fake_batch(x) if x.ndim == 3 else x.new_empty(x.shape)


# Two results, one of them nothing: inductor (torch 2.13) fails on a single one where no tensor is given to write to.
@operator(
    _fake_fn,
    mutates=["conv_states", "final_states_out"],
    results=2,
    only={"activation": str, "metadata": NoneType},
    unused=partial(check_unused, kind=UnusedConv),
)
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: bool | str | None = "auto",
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
    null_block_id: int | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    use_cache: bool | None = None,
    **unused: Unpack[UnusedConv],
) -> Any:
    """Convolve sequences of any length, packed or a batch; keep the last width-1 tokens of each in its line.

    The five arguments before `unused` are causal-conv1d's and transformers', by name. Those that ask for something are
    for a batch without conv_states, whose place they take.

    Args:
        x: `(dim, tokens)`, packed; or `(batch, dim, tokens)`, a sequence each. Other strides than those of
            `[tokens, dim]` rows with contiguous channels cost a copy, and one more of packed outputs. fp32, bf16 or
            fp16; rounded to the states' dtype before its use.
        weight: `(dim, width)`, width 2..6. bias: `(dim,)` or None. Any of the three dtypes each.
        conv_states: `(lines, dim, >= width-1)`, or None for no states. The channels of a column are contiguous, as in a
            transposed view of `[lines, columns, dim]`, which is faster, or the columns of a channel; lines are any
            distance apart. Mutated: columns 0..width-2 of the lines of sequences that are not empty.
        query_start_loc: `(N+1,)` int32 or int64, the first token of each packed sequence and the end of the last.
        cache_indices: `(>= N,)`, the line of each sequence; None: sequence i has line i. A sequence whose index is
            negative or `pad_slot_id` is skipped: its outputs are zero, no line is touched.
        has_initial_state: `(>= N,)` bool, whether the line's columns 0..width-2 precede a sequence; None: never.
        activation: True, "silu" or "swish"; None or False for none; "auto" is SiLU for packed x, as in vLLM, and none
            for a batch, as in causal-conv1d.
        metadata, use_cache: not needed. validate_data: check what the index tensors say, which waits for the device,
            and refuse packed x whose channels are not contiguous, as vLLM and SGLang do.
        null_block_id: takes the place of `pad_slot_id` where it is given; line 0 is an ordinary one unless it is 0.
        seq_idx: `(batch, tokens)` int32 or int64, the sequence of each token: one begins where the number changes, and
            tokens below 0 are padding, whose outputs are zero. It costs a sort of all tokens and a search in them.
        initial_states: `(batch, dim, width-1)` of any of the three dtypes, what precedes the first sequence of each of
            the batch, rounded to x's dtype. return_final_states: return those behind the last tokens, too; not beside
            seq_idx. final_states_out: likewise, mutated and returned; None: a new tensor of x's dtype.
        unused: what engines pass, and changes nothing (`UnusedConv`).

    Returns:
        As x, in its dtype: packed with its order of memory, unspecified for tokens of no sequence; of a batch the
        transpose of contiguous `[batch, tokens, dim]`. With return_final_states this and `(batch, dim, width-1)`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedConv)
    check_flag("return_final_states", return_final_states)
    is_batch = isinstance(x, Tensor) and x.ndim == 3
    silu = not is_batch if activation == "auto" else parse_activation(activation)
    skip = parse_pad(pad_slot_id, null_block_id)
    if is_batch and query_start_loc is not None:
        raise ValueError("query_start_loc: expected None beside x (batch, dim, tokens), got a tensor")
    if not is_batch or conv_states is not None:
        _refuse(seq_idx=seq_idx, initial_states=initial_states)
        _refuse(return_final_states=return_final_states, final_states_out=final_states_out)
    elif seq_idx is not None or initial_states is not None or return_final_states or final_states_out is not None:
        check_is(None, "as conv_states is None", cache_indices=cache_indices, has_initial_state=has_initial_state)
        return convolve_batch(
            x, weight, bias, seq_idx, initial_states, final_states_out, final=return_final_states, silu=silu
        )
    if is_batch:
        tokens, num_rows, length = pack_tokens(x, None)
    else:
        tokens, length = pack_columns(x, validate=validate_data), 0
    num_tokens, dim = tokens.shape
    device = x.device
    check_filter(weight, bias, dim, device)
    width = weight.shape[1]
    if conv_states is not None:
        check_states("conv_states", conv_states, dim, width, device)
    if not is_batch:
        query_start_loc = check_indices("query_start_loc", query_start_loc, device, 1, more=True).contiguous()
        num_rows = query_start_loc.shape[0] - 1
    if cache_indices is not None:
        cache_indices = check_indices("cache_indices", cache_indices, device, num_rows, more=True)[:num_rows]
    elif conv_states is not None and conv_states.shape[0] < num_rows:
        raise ValueError(f"conv_states: expected at least {num_rows} lines, got {conv_states.shape[0]}")
    if has_initial_state is not None:
        check_indices("has_initial_state", has_initial_state, device, num_rows, (torch.bool,), more=True)
        if conv_states is None:
            check_is(None, "as conv_states is None", has_initial_state=has_initial_state)
    history = False if has_initial_state is None else has_initial_state[:num_rows].contiguous()
    pad = -1 if cache_indices is None else skip
    longest = length if is_batch else num_tokens
    rows = EngineRows(num_rows, longest, length, query_start_loc, cache_indices, cache_indices, pad, history, None)
    lines = None if conv_states is None else conv_states.transpose(1, 2)
    if validate_data:
        num_lines, columns = (None, width - 1) if lines is None else lines.shape[:2]
        check_contents(rows, "cache_indices", num_tokens, num_lines, columns, width)
    y = torch.empty((num_tokens, dim), dtype=x.dtype, device=device)
    convolve(tokens, weight.t(), bias, lines, rows, y, silu)
    return unpack_tokens(y, x) if is_batch else unpack_columns(y, x)


@operator(
    _fake_update,
    mutates=["conv_state", "out"],
    only={"activation": str},
    unused=partial(check_unused, kind=UnusedConvSteps),
)
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = -1,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
    out: Tensor | None = None,
    null_block_id: int | None = None,
    cache_seqlens: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    **unused: Unpack[UnusedConvSteps],
) -> Tensor:
    """Convolve the next tokens of each sequence and slide its line; nothing but `conv_state` and `out` is written.

    A line holds the history in columns 0..width-2. Plain: they become the last width-1 of (history, x). Speculative
    (num_accepted_tokens): history is the width-1 columns from accepted-1 on, and the line becomes (history[1:], x),
    width-2+n columns, so that the next call can continue behind any of the n tokens. Others stay as they are, and so
    do the lines of rows of no tokens: their accepted tokens are told again with the next call.

    Args:
        x: `(batch, dim)`, `(batch, dim, n)`, or `(tokens, dim)` with query_start_loc; fp32, bf16 or fp16. Other
            strides than those of contiguous `[tokens, dim]` rows cost a copy.
        conv_state: `(lines, dim, >= width-1)` of the strides that `causal_conv1d_fn` takes; speculative: >= width-2+n
            columns.
        weight, bias: as for `causal_conv1d_fn`. activation: likewise, but for "auto". validate_data: check what the
            index tensors say; waits for the device.
        conv_state_indices: `(>= batch,)`, the line of each row; None: row i has line i. Or a table `(>= batch,
            blocks)`: row i reads line table[i, initial_state_idx[i]] and writes
            table[i, block_idx_last_scheduled_token[i]], both of as many rows; without the two, column 0. A row with a
            negative line or `pad_slot_id`, or with a block that the table does not have, is skipped: its outputs are
            zero, no line is touched. With query_start_loc there are as many rows as entries.
        num_accepted_tokens: `(batch,)`, accepted tokens of the previous call, its first included; 0 counts as 1.
            num_accept_tokens: SGLang's name of the same.
        query_start_loc: `(batch+1,)`. It and num_accepted_tokens may have more entries, which are not read.
        max_query_len: upper bound of the length of a row, -1 if not known: slower above 8 tokens. CUDA skips a
            speculative row that its line can't keep. It writes no more than its own line for a row above the bound,
            whose outputs are unspecified. The CPU refuses both.
        out: of x's shape and dtype, or None; may be x, but must not overlap it otherwise.
        null_block_id: takes the place of `pad_slot_id` where it is given; line 0 is an ordinary one unless it is 0.
        cache_seqlens: `(batch,)`, the tokens of each row before these, where lines are circular, as causal-conv1d's may
            be: column i % columns has a sequence's token i, and only these tokens' columns are written. For x without
            query_start_loc, and a line per row.
        unused: what engines pass, and changes nothing (`UnusedConvSteps`).

    Returns:
        `out`, or a new tensor of x's shape and dtype; unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedConvSteps)
    if num_accept_tokens is not None:
        if num_accepted_tokens is not None:
            raise ValueError("num_accept_tokens: expected None beside num_accepted_tokens, got a tensor")
        num_accepted_tokens = num_accept_tokens
    silu = parse_activation(activation)
    skip = parse_pad(pad_slot_id, null_block_id)
    check_integer("max_query_len", max_query_len)
    tokens, num_rows, length = pack_tokens(x, query_start_loc)
    num_tokens, dim = tokens.shape
    device = x.device
    check_filter(weight, bias, dim, device)
    width = weight.shape[1]
    check_states("conv_state", conv_state, dim, width, device)
    read, write = pick_lines(
        conv_state_indices, initial_state_idx, block_idx_last_scheduled_token, device, validate=validate_data
    )
    if cache_seqlens is not None:
        others = {
            "query_start_loc": query_start_loc,
            "num_accepted_tokens": num_accepted_tokens,
            "initial_state_idx": initial_state_idx,
        }
        for name, given in others.items():
            if given is not None:
                raise ValueError(f"{name}: expected None beside cache_seqlens, got {type(given).__name__}")
        _check_lines(conv_state, read, num_rows)
        conv_state, read = take_turn(
            conv_state, tokens, length, cache_seqlens, None if read is None else read[:num_rows], skip, width
        )
        write, skip = read, -1
    if query_start_loc is not None:
        least = 1 if read is None else read.shape[0] + 1
        check_indices("query_start_loc", query_start_loc, device, least, more=True)
        num_rows = query_start_loc.shape[0] - 1 if read is None else read.shape[0]
        query_start_loc = query_start_loc.contiguous()
    _check_lines(conv_state, read, num_rows)
    if read is not None and write is not None:
        read, write = read[:num_rows], write[:num_rows]
    if num_accepted_tokens is not None:
        check_indices("num_accepted_tokens", num_accepted_tokens, device, num_rows, more=True)
        num_accepted_tokens = num_accepted_tokens.contiguous()
    bounded = query_start_loc is None or max_query_len >= 0
    longest = length if query_start_loc is None else max_query_len if bounded else num_tokens
    pad = -1 if read is None else skip
    rows = EngineRows(num_rows, longest, length, query_start_loc, read, write, pad, True, num_accepted_tokens)
    lines = conv_state.transpose(1, 2)
    most = rows.most_tokens(lines.shape[1], width)
    if most is not None and bounded and longest > most:
        raise ValueError(
            f"conv_state: expected at least width - 2 + {longest} tokens = {width - 2 + longest} columns, as every "
            f"draft is kept until it is known how many are accepted, got {lines.shape[1]}"
        )
    if validate_data:
        check_contents(rows, "conv_state_indices", num_tokens, conv_state.shape[0], lines.shape[1], width)
    if out is None:
        y = torch.empty((num_tokens, dim), dtype=x.dtype, device=device)
        convolve(tokens, weight.t(), bias, lines, rows, y, silu)
        return unpack_tokens(y, x)
    check_operand("out", out, {f"x.shape[{i}]": size for i, size in enumerate(x.shape)}, (x.dtype,), device)
    packed = out.transpose(1, 2) if out.ndim == 3 else out
    if packed.is_contiguous():
        convolve(tokens, weight.t(), bias, lines, rows, packed.view(num_tokens, dim), silu)
    else:
        y = torch.empty((num_tokens, dim), dtype=x.dtype, device=device)
        convolve(tokens, weight.t(), bias, lines, rows, y, silu)
        out.copy_(unpack_tokens(y, x))
    return out


def _check_lines(conv_state: Tensor, read: Tensor | None, num_rows: int) -> None:
    """Raise ValueError unless there is a line, or an index of one, for each row."""
    if read is None and conv_state.shape[0] < num_rows:
        raise ValueError(f"conv_state: expected at least {num_rows} lines, got {conv_state.shape[0]}")
    if read is not None and read.shape[0] < num_rows:
        raise ValueError(f"conv_state_indices: expected at least {num_rows} rows as x has, got {read.shape[0]}")


def _refuse(**asked: object) -> None:
    """Raise ValueError for an argument of causal-conv1d that asks for something."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None or False, as {INSTEAD[name]}, got {type(value).__name__}")
