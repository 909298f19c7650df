"""The code that Triton makes of the LoRA kernels for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from deltaline_kernels.lora import plan

# What a program may have on a Hopper GPU.
SHARED_BYTES = 227 << 10
TYPES = {
    "x": "*bf16",
    "a": "*bf16",
    "b": "*bf16",
    "halves": "*bf16",
    "sums": "*bf16",
    "out": "*bf16",
    "ranks": "*i32",
    "scales": "*fp32",
    "tile_slots": "*i32",
    "tile_tokens": "*i32",
}


def compile_ptx(kernel: Any, constants: dict[str, Any], num_warps: int, num_stages: int) -> str:
    """Compile a kernel for bf16 whose row strides are multiples of 16; check that it fits in the shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else TYPES.get(name, "i32")
        if name in TYPES or name.endswith("stride"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= SHARED_BYTES
    return str(made.asm["ptx"])


def check_products(ptx: str) -> None:
    """Check that there are asynchronous products, and that every one has its first operand in shared memory."""
    products = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\S)", ptx)
    assert products and set(products) == {"%"}
    assert "mma.sync" not in ptx


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("bucket", dict.fromkeys(row.shrink for row in plan.DENSE_BUCKETS), ids=str)
def test_dense_shrinks_take_no_operand_from_registers(bucket: tuple[int, int, int, int]) -> None:
    """Where they do, in a loop that loads ahead, an assembler overwrites the operand before the product has read it."""
    dense = pytest.importorskip("deltaline_kernels.lora.dense", reason="needs triton")
    ranks, inputs, warps, stages = bucket
    constants = {
        "scaling": None,
        "K": 2048,
        "R": 256,
        "S": 1,
        "COLUMNS": 256,
        "BLOCKS": 256 // ranks,
        "BLOCK_M": plan.DENSE_TILE,
        "BLOCK_R": ranks,
        "BLOCK_K": inputs,
        "STEPS": 2048 // inputs,
        "DEPENDENTS": False,
    }
    check_products(compile_ptx(dense.shrink_kernel, constants, warps, stages))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("bucket", dict.fromkeys(row.expand for row in plan.DENSE_BUCKETS), ids=str)
def test_dense_expands_take_no_operand_from_registers(bucket: tuple[int, int, int, int, bool, int | None]) -> None:
    """As above: so the shrink leaves halves in the dtype of the weights, and no sums to be split here."""
    dense = pytest.importorskip("deltaline_kernels.lora.dense", reason="needs triton")
    outputs, ranks, warps, stages, early, _ = bucket
    constants = {
        "factors": None,
        "RANK_STRIDE": 1024,
        "OUTPUT_STRIDE": 1,
        "ADD": True,
        "N": 1024,
        "R": 256,
        "SIZES": (1024,),
        "COLUMNS": 256,
        "PARTS": 1024 // outputs,
        "BLOCK_M": plan.DENSE_TILE,
        "BLOCK_R": ranks,
        "BLOCK_N": outputs,
        "EARLY": early,
        "DEPENDENT": False,
    }
    check_products(compile_ptx(dense.expand_kernel, constants, warps, stages))
