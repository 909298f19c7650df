"""The gated delta rule over packed rows: the gates, and the delta rule token by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.device.delta_rule.reference import delta_rule_reference
from deltaline_kernels.rows import Rows


def gated_delta_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_key_heads: int,
    scale: float | None = None,
    eps: float = 1e-6,
    normalize: bool = True,
) -> Tensor:
    """Return o `[T, HV, V]` in qkv.dtype; mutates `state` and `drafts` as `gated_delta` does."""
    compute = torch.promote_types(qkv.dtype, torch.float32)
    g, beta = a.to(compute), b.to(compute)  # (T, HV)
    if A_log is not None and dt_bias is not None:
        g = -A_log.to(compute).exp() * F.softplus(g + dt_bias.to(compute))
        beta = beta.sigmoid()
    return delta_rule_reference(
        qkv,
        g[..., None],
        beta,
        state,
        drafts,
        rows,
        num_key_heads=num_key_heads,
        scale=scale,
        eps=eps,
        normalize=normalize,
    )
