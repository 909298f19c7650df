"""LoRA as vLLM calls it: `lora_shrink` and `lora_expand`, tokens sorted by adapter in tensors that the engine prepares.

Sums are fp32, added to the outputs in fp32 and rounded once; nothing uses atomics. The tokens of an adapter are those
that the sorted indices, counts and starts name; `token_lora_mapping` is not read, as in vLLM's kernels. Nothing
waits for the device, and nothing is kept of a call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS
from deltaline_kernels.compat.arguments import check_integer, check_number
from deltaline_kernels.compat.lora.cpu import expand_cpu, shrink_cpu
from deltaline_kernels.compat.lora.tokens import AdapterTokens, check_on
from deltaline_kernels.lora.weights import MAX_RANK
from deltaline_kernels.operators import operator

# Dimensions of the weights.
LAYOUT = {"lora_a_weights": ("slots", "rank", "in"), "lora_b_weights": ("slots", "out", "rank")}


def _fake(**_: Any) -> None:
    pass


@operator(_fake, mutates=["output_tensor"], results=0, only={"num_active_loras": Tensor})
def lora_shrink(
    inputs: Tensor,
    lora_a_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor | int,
    scaling: float,
) -> None:
    """Write scaling * x A^T of each token's adapter to `output_tensor`, and zeros for tokens without one.

    Args:
        inputs: `[T, in]` bf16, fp16 or fp32.
        lora_a_weights: S tensors `[slots, R, in]` or `[slots, 1, R, in]` of one shape and inputs.dtype, contiguous.
        output_tensor: `[S, T, R]` fp32, contiguous. Mutated; whatever it held before does not count.
        token_lora_mapping: `[T]` int32. token_indices_sorted_by_lora_ids: `[T]` int32.
        num_tokens_per_lora, lora_ids: `[max_loras + 1]` int32, the number of tokens and the slot of each adapter, -1
            for tokens without one and behind the last one. lora_token_start_loc: `[max_loras + 2]` int32.
        no_lora_flag_cpu: `[1]` bool on the CPU; where it is set, nothing is done and nothing is written.
        num_active_loras: on the CPU; so many of `lora_ids` count.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    tokens = AdapterTokens.check(
        inputs,
        0,
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        num_active_loras,
    )
    skip = _parse_flag(no_lora_flag_cpu)
    weights = _check_weights("lora_a_weights", lora_a_weights, inputs)
    _, rank, num_inputs = weights[0].shape
    if any(weight.shape != weights[0].shape for weight in weights):
        raise ValueError(f"lora_a_weights: expected one shape, got {[tuple(weight.shape) for weight in weights]}")
    if inputs.dtype != weights[0].dtype:
        raise TypeError(f"inputs: expected {weights[0].dtype} as lora_a_weights have, got {inputs.dtype}")
    check_on("inputs", inputs, {"tokens": None, "in": num_inputs}, ACTIVATIONS, inputs.device)
    size = {"slices": len(weights), "tokens": tokens.num_tokens, "rank": rank}
    check_on("output_tensor", output_tensor, size, (torch.float32,), inputs.device, contiguous=True)
    check_number("scaling", scaling)
    if skip or tokens.num_tokens == 0:
        return
    output_tensor.zero_()
    x = inputs.contiguous()
    if x.device.type == "cpu":
        shrink_cpu(x, weights, output_tensor, tokens, float(scaling))
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.compat.lora.launch import shrink_triton

        shrink_triton(x, weights, output_tensor, tokens, float(scaling))


@operator(_fake, mutates=["output_tensor"], results=0, only={"num_active_loras": Tensor})
def lora_expand(
    inputs: Tensor,
    lora_b_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor | int,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """Write s B^T of each token's adapter to `output_tensor`, or add it; tokens without an adapter stay as they are.

    Args:
        inputs: `[S, T, R]` fp32, bf16 or fp16, R contiguous.
        lora_b_weights: S tensors `[slots, out, R]` or `[slots, 1, out, R]` of one dtype and number of slots,
            contiguous; `out` may differ.
        output_tensor: `[T, >= offset_start + sum(out)]` bf16, fp16 or fp32, contiguous. Mutated: slice i fills the
            columns behind those of the slices before it, from `offset_start` on; the others stay as they are.
        offset_start: the first column. add_inputs: add to what is there, in fp32 and rounded once.

    The seven tensors between are those of `lora_shrink`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    tokens = AdapterTokens.check(
        inputs,
        1,
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        num_active_loras,
    )
    skip = _parse_flag(no_lora_flag_cpu)
    weights = _check_weights("lora_b_weights", lora_b_weights, inputs)
    num_slots, _, rank = weights[0].shape
    if any((weight.shape[0], weight.shape[2]) != (num_slots, rank) for weight in weights):
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"lora_b_weights: expected one number of slots and one rank, got {shapes}")
    check_on("inputs", inputs, {"slices": len(weights), "tokens": None, "rank": rank}, ACTIVATIONS, inputs.device)
    check_integer("offset_start", offset_start)
    if offset_start < 0:
        raise ValueError(f"offset_start: expected at least 0, got {offset_start}")
    size = {"tokens": tokens.num_tokens, "columns": None}
    check_on("output_tensor", output_tensor, size, ACTIVATIONS, inputs.device, contiguous=True)
    end = offset_start + sum(weight.shape[1] for weight in weights)
    if output_tensor.shape[1] < end:
        raise ValueError(f"output_tensor: expected at least {end} columns, got {output_tensor.shape[1]}")
    if skip or tokens.num_tokens == 0:
        return
    sums = inputs.contiguous()
    if sums.device.type == "cpu":
        expand_cpu(sums, weights, output_tensor, tokens, offset_start, add=add_inputs)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.compat.lora.launch import expand_triton

        expand_triton(sums, weights, output_tensor, tokens, offset_start, add=add_inputs)


def _parse_flag(no_lora_flag_cpu: Tensor) -> bool:
    """Return whether no token has an adapter, as the engine says on the host."""
    check_on("no_lora_flag_cpu", no_lora_flag_cpu, {"flags": 1}, (torch.bool,), torch.device("cpu"))
    return bool(no_lora_flag_cpu[0])


def _check_weights(name: str, weights: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
    """Return the weights with three dimensions each, checked but for their shapes beside each other."""
    if not isinstance(weights, list | tuple) or not all(isinstance(weight, Tensor) for weight in weights):
        raise TypeError(f"{name}: expected a list of tensors, got {type(weights).__name__}")
    if not weights:
        raise ValueError(f"{name}: expected at least one tensor, got none")
    found = []
    for i, weight in enumerate(weights):
        if weight.ndim == 4 and weight.shape[1] == 1:
            weight = weight[:, 0]
        check_on(f"{name}[{i}]", weight, dict.fromkeys(LAYOUT[name]), ACTIVATIONS, inputs.device, contiguous=True)
        if weight.dtype != weights[0].dtype:
            raise TypeError(f"{name}[{i}]: expected {weights[0].dtype} as the first one has, got {weight.dtype}")
        rank = weight.shape[LAYOUT[name].index("rank")]
        if weight.numel() == 0 or rank > MAX_RANK:
            raise ValueError(
                f"{name}[{i}]: expected values and a rank of at most {MAX_RANK}, got {tuple(weight.shape)}"
            )
        found.append(weight)
    return found
