"""The code that Triton makes of hyper-connections for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from deltaline_kernels.device.sizes import SHARED_BYTES
from deltaline_kernels.mhc import plan
from deltaline_kernels.mhc.gates import NUM_TERMS, count_columns

SHAPES = (
    (64, 4, 7168),
    (64, 8, 7168),
    (65, 8, 7168),
    (513, 8, 200),
    (4096, 1, 7168),
    (4096, 4, 7168),
    (4096, 8, 1280),
    (4096, 8, 7168),
)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("weight_type", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    "shape",
    [
        (64, 4, 4096),
        (65, 4, 4096),
        (4096, 4, 4096),
        (4096, 8, 200),
        *(pytest.param(shape, marks=pytest.mark.sweep) for shape in SHAPES),
    ],
    ids=str,
)
def test_products_of_many_tokens_are_done_when_their_operands_go(shape: tuple[int, int, int], weight_type: str) -> None:
    """No operand is in registers, which an assembler overwrites in a loop that loads ahead, before a product has read
    it; and no product still runs when what it reads in shared memory is loaded anew.
    """
    num_tokens, streams, hidden = shape
    product = pytest.importorskip("deltaline_kernels.mhc.product", reason="needs triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = plan.plan_pre(num_tokens, streams, hidden, torch.bfloat16, norm=False)
    constants = {
        "K": streams * hidden,
        "OUTS": streams * (2 + streams),
        "COMB": streams**2,
        "PAD": count_columns(streams * (2 + streams)),
        "SPLITS": made.splits,
        "BLOCK_M": made.block_m,
        "BLOCK_K": made.block_k,
        "STEPS": made.steps,
        "TERMS": NUM_TERMS,
        "OVERLAP": True,
        "WAITS": False,
    }
    signature, aligned = {}, {}
    for i, name in enumerate(product.product_kernel.arg_names):
        is_tensor = name in ("residual", "weight", "partials")
        kind = ("*fp32" if name == "partials" else weight_type if name == "weight" else "*bf16") if is_tensor else "i32"
        signature[name] = "constexpr" if name in constants else kind
        if is_tensor or name == "residual_stride":
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(product.product_kernel, signature, constants, aligned)
    options = {"num_warps": made.warps, "num_stages": made.stages}
    code: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert code.metadata.shared <= SHARED_BYTES
    # Whatever a product reads may be overwritten by what is loaded next: none may still run then. A wait that leaves
    # some pending is none: without the one that the kernel makes Triton insert, Triton's own leaves the last two.
    runs = False
    for line in code.asm["ttgir"].splitlines():
        if "warp_group_dot_wait" in line:
            runs = runs and "pendings = 0" not in line
        elif "warp_group_dot " in line:
            runs = True
        assert not (runs and ("async_copy" in line or "scf.yield" in line)), line
    products = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", code.asm["ptx"])
    assert products and set(products) == {"%"}
    assert "mma.sync" not in code.asm["ptx"]
