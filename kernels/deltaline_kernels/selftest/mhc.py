"""What the self-test computes for layers of several residual streams."""

from collections.abc import Iterator

import torch

from deltaline_kernels.mhc import (
    mhc_head,
    mhc_head_reference,
    mhc_post_pre,
    mhc_post_reference,
    mhc_pre,
    mhc_pre_reference,
    prepare_gates,
)
from deltaline_kernels.selftest.shapes import Compared, Fills

# Tokens of batches of every bucket of the plan; on a GPU of several chunks too.
TOKENS, TOKENS_GPU = (1, 20, 100), (1, 40, 130, 400, 1300)


def compare_mhc(fills: Fills, streams: int, hidden: int, dtype: torch.dtype) -> Iterator[Compared]:
    """Yield the name of each family, batch and kind of input, what was computed and what its reference computed."""
    for kind, fill in fills.items():
        on_gpu = fill(1).device.type != "cpu"
        rows, inputs = streams * (2 + streams), streams * hidden
        # Products of moderate size: of large ones every gate would be 0 or 1.
        weight = fill(rows, inputs) * inputs**-0.5
        gates = prepare_gates(weight, fill(3), fill(rows))
        norm = fill(hidden)
        for num_tokens in TOKENS_GPU if on_gpu and kind == "random" else TOKENS:
            x, residual = fill(num_tokens, hidden).to(dtype), fill(num_tokens, streams, hidden).to(dtype)
            own = x, residual, fill(num_tokens, streams), fill(num_tokens, streams, streams)
            label = f"{num_tokens} tokens, {kind}"
            given = mhc_pre(residual, gates, norm_weight=norm)
            yield f"mhc, pre, {label}", list(given), list(mhc_pre_reference(residual, gates, norm_weight=norm))
            got, mixed = mhc_post_pre(*own, gates), mhc_post_reference(*own)
            # The gates are those of the streams as they were rounded.
            yield f"mhc, post and pre, {label}", list(got), [mixed, *mhc_pre_reference(got[0], gates)]
            head = weight[:streams].contiguous(), gates.scale[:1], gates.base[:streams]
            yield f"mhc, head, {label}", [mhc_head(residual, *head)], [mhc_head_reference(residual, *head)]
