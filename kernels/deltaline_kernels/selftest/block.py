"""What the self-test computes of blocks: residuals, norms, an MLP's activation, and products that are not torch's."""

from collections.abc import Iterator

import torch
from torch import Tensor

from deltaline_kernels.activation import silu_and_mul, silu_and_mul_reference
from deltaline_kernels.linear import linear, linear_reference
from deltaline_kernels.linear.fastest import FASTEST
from deltaline_kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from deltaline_kernels.selftest.shapes import Compared, Fill, Fills

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
            for name, y, product in compare_products(fill, hidden, mlp_dim, dtype):
                yield f"{name}, {kind}", [y], [product]


def compare_products(fill: Fill, hidden: int, mlp_dim: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, product and reference of an MLP's products of as many rows as the table of algorithms has."""
    for outputs, inputs in ((2 * mlp_dim, hidden), (hidden, mlp_dim)):
        counts = [num_rows for num_rows, *size in FASTEST if size == [outputs, inputs]]
        if counts:
            # Products of about 1: errors are judged beside that.
            weight = (fill(outputs, inputs) * inputs**-0.5).to(dtype)
            for num_rows in counts:
                x = fill(num_rows, inputs).to(dtype)
                yield f"linear, {num_rows} rows of {inputs}", linear(x, weight), linear_reference(x, weight)
