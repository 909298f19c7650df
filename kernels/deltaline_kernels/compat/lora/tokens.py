"""The tokens of each adapter as vLLM's metadata names them, checked. No contents are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltaline_kernels.checks import check_tensor
from deltaline_kernels.compat.arguments import check_integer, check_operand

# Checks one tensor of any strides.
check_on = partial(check_operand, beside=None)


@dataclass(frozen=True, eq=False)
class AdapterTokens:
    """Tokens grouped by adapter: group i has `counts[i]` of them, from `order[starts[i]]` on, of slot `ids[i]`.

    Args:
        order: `[T]`. counts, ids: `[groups]`. starts: `[groups + 1]`. All int32, contiguous, on one device.
        num_ids: groups that count.
    """

    order: Tensor
    counts: Tensor
    starts: Tensor
    ids: Tensor
    num_ids: int

    @property
    def num_tokens(self) -> int:
        return self.order.shape[0]

    @classmethod
    def check(
        cls,
        inputs: Tensor,
        token_dim: int,
        mapping: Tensor,
        order: Tensor,
        counts: Tensor,
        starts: Tensor,
        ids: Tensor,
        num_active: Tensor | int,
    ) -> AdapterTokens:
        """Check the engine's tensors against the tokens of `inputs`, its dimension `token_dim`.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was got.
        """
        if not isinstance(inputs, Tensor):
            raise TypeError(f"inputs: expected a tensor, got {type(inputs).__name__}")
        if inputs.ndim != token_dim + 2:
            raise ValueError(f"inputs: expected {token_dim + 2} dimensions, got shape {tuple(inputs.shape)}")
        device, int32, num_tokens = inputs.device, (torch.int32,), inputs.shape[token_dim]
        check_tensor("token_lora_mapping", mapping, (num_tokens,), int32, device)
        check_tensor("token_indices_sorted_by_lora_ids", order, (num_tokens,), int32, device)
        check_tensor("lora_ids", ids, (None,), int32, device)
        num_groups = ids.shape[0]
        check_tensor("num_tokens_per_lora", counts, (num_groups,), int32, device)
        check_tensor("lora_token_start_loc", starts, (num_groups + 1,), int32, device)
        if isinstance(num_active, Tensor):
            if num_active.device.type != "cpu" or num_active.numel() != 1 or num_active.is_floating_point():
                raise ValueError(
                    f"num_active_loras: expected an integer on the CPU, got {num_active.dtype} of shape "
                    f"{tuple(num_active.shape)} on {num_active.device}"
                )
            num_active = int(num_active)
        check_integer("num_active_loras", num_active)
        if not 0 <= num_active <= num_groups:
            raise ValueError(f"num_active_loras: expected 0..{num_groups}, got {num_active}")
        return cls(order, counts, starts, ids, num_active)
