"""KDA over packed rows: the gates, and the delta rule token by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.device.delta_rule.reference import delta_rule_reference
from deltaline_kernels.rows import Rows


def kda_reference(
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
    lower_bound: float | None = None,
) -> Tensor:
    """Return o `[T, HV, V]` in qkv.dtype; mutates `state` and `drafts` as `kda` does."""
    g, beta = find_gates(a, b, A_log, dt_bias, lower_bound, state.shape[1])
    return delta_rule_reference(
        qkv,
        g,
        beta,
        state,
        drafts,
        rows,
        num_key_heads=num_key_heads,
        scale=scale,
        eps=eps,
        normalize=normalize,
    )


def find_gates(
    a: Tensor, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Return g `[T, HV, K]` and beta `[T, HV]` in fp32 (fp64 when given fp64), of arguments of `kda`."""
    compute = torch.promote_types(a.dtype, torch.float32)
    g, beta = a.to(compute).unflatten(-1, (num_heads, -1)), b.to(compute)
    if A_log is None or dt_bias is None:
        return g, beta
    return log_decays(g, A_log.to(compute), dt_bias.to(compute), lower_bound), beta.sigmoid()


def log_decays(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Return the log decays of g `[T, HV, K]`, in its dtype; A_log `[HV]` and dt_bias `[HV*K]` are of the same."""
    rate = A_log.exp()[:, None]
    x = g + dt_bias.unflatten(0, (len(A_log), -1))
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
