"""The norm of hidden states."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x `[T, D]` in fp32 and scale it by `weight` `[D]` fp32; rounded to x.dtype once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
