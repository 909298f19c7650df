"""What the self-test computes of what blocks have around their products: residuals, norms, and an MLP's activation."""

from collections.abc import Iterator

import torch

from deltaline_kernels.activation import silu_and_mul, silu_and_mul_reference
from deltaline_kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from deltaline_kernels.selftest.shapes import Compared, Fills

NUM_TOKENS, EPS, SCALE = 40, 1e-6, 0.5


def compare_block(fills: Fills, hidden: int, mlp_dim: int, limit: float, dtype: torch.dtype) -> Iterator[Compared]:
    """Yield the name of each family and kind of input, what was computed and what its reference computed."""
    for kind, fill in fills.items():
        x, weight = fill(NUM_TOKENS, hidden).to(dtype), fill(hidden)
        yield f"residual, norm, {kind}", [rms_norm(x, weight, EPS)], [rms_norm_reference(x, weight, EPS)]
        for kept in dict.fromkeys((dtype, torch.float32)):
            residual = fill(NUM_TOKENS, hidden).to(kept)
            total, y = add_rms_norm(x, residual, weight, EPS, scale=SCALE)
            want, _ = add_rms_norm_reference(x, residual, weight, EPS, scale=SCALE)
            # The norm is that of the sum as it was rounded.
            yield (
                f"residual, sum in {kept}, {kind}",
                [total, y],
                [want, rms_norm_reference(total.to(dtype), weight, EPS)],
            )
        if mlp_dim:
            gate_up = fill(NUM_TOKENS, 2 * mlp_dim).to(dtype)
            yield f"activation, {kind}", [silu_and_mul(gate_up, limit)], [silu_and_mul_reference(gate_up, limit)]
