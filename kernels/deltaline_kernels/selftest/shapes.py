"""The sizes and dtypes of a model that the self-test computes with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.gated_delta.inputs import DeltaHeads

# Makes a tensor of a shape, in fp32, of some kind of contents.
Fill = Callable[..., Tensor]
# The name of a family and of what it ran on, what it computed and what its reference computed.
Compared = tuple[str, list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Shapes:
    """What `run_selftest` is told, by the same names; `heads` stand for those of other mixers too."""

    recurrence: str
    heads: DeltaHeads
    conv_width: int
    max_draft: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    norm_groups: int
    dt_limit: tuple[float, float]
    has_conv_bias: bool
    rotary_dim: int
    page_size: int

    @property
    def is_mamba(self) -> bool:
        return self.recurrence == "mamba2"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the recurrence."""
        if self.is_mamba:
            return {"num_groups": self.heads.num_key_heads, "dt_limit": self.dt_limit}
        return {"num_key_heads": self.heads.num_key_heads}
