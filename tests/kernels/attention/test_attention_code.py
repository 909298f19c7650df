"""The code that Triton makes of the attention of long rows for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re
from functools import cache

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import Modifiers, Rows, find_modifier, flex_decode

# What a program may have on a Hopper GPU.
SHARED_BYTES = 227 << 10
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
# Registers that an instruction writes, by the width that its name says.
WIDTHS = {".64": 2, ".128": 4}
WRITES = re.compile(r"^(?:@!?U?P\w+ )?([A-Z]\S*) (?:U?P\w+, )*R(\d+)\b")
PRODUCT = re.compile(r"HGMMA\.64x256x16\S* R\d+, R(\d+), gdesc")


@cache
def compile_long_rows() -> tuple[str, ...]:
    """Return the instructions for rows of 8,192 tokens with a model's 24 heads of 256 in groups of 6."""
    pytest.importorskip("triton")

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = Rows(draw(7, 2, dtype=torch.int32), 0, 1, 8192)
    q, pages, table = draw(8192, 24, 256), draw(200, 64, 4, 256), draw(3, 130, dtype=torch.int32)
    causal = Modifiers(mask=find_modifier("causal")(), device="meta")
    with pytest.MonkeyPatch.context() as patch:
        (kernel,) = compile_launches(
            patch, lambda: flex_decode(q, pages, pages, table, rows, modifiers=causal, gate=draw(8192, 24, 256))
        )
    assert kernel.metadata.name == "attend_long_kernel" and kernel.metadata.shared <= SHARED_BYTES
    return tuple(line.split("\t")[-1].strip() for line in kernel.asm["sass"].splitlines())


def find_waits(code: tuple[str, ...], pending: int) -> list[int]:
    """Return where at most so many groups of products are waited to be left."""
    return [i for i, line in enumerate(code) if f"WARPGROUP.DEPBAR.LE gsb0, {pending:#x}" in line]


def test_nothing_is_spilled() -> None:
    assert not [line for line in compile_long_rows() if re.search(r"\b(LDL|STL)\b", line)]


def test_exponentials_run_beside_products() -> None:
    """Of 128 queries and 64 keys each of 256 threads has 32, in a masked and in a whole block of keys."""
    code = compile_long_rows()
    begin = find_waits(code, 1)[-1]
    end = next(i for i in find_waits(code, 0) if i > begin)
    assert sum("MUFU.EX2" in line for line in code[begin:end]) >= 2 * 32


def test_no_operand_of_a_running_product_is_written() -> None:
    """The weights are operands in registers, which an assembler may hand to something else too early."""
    code = compile_long_rows()
    products = [(i, int(found[1])) for i, line in enumerate(code) if (found := PRODUCT.search(line))]
    # Four for each block of 64 keys, in the loop and behind it.
    assert len(products) == 2 * 4
    for begin, first in products:
        end = next(i for i in find_waits(code, 0) if i > begin)
        for line in code[begin + 1 : end]:
            found = WRITES.match(line)
            if found and "HGMMA" not in found[1] and not found[1].startswith(("ST", "SYNCS")):
                width = next((count for suffix, count in WIDTHS.items() if suffix in found[1]), 1)
                written = set(range(int(found[2]), int(found[2]) + width))
                assert not written & set(range(first, first + 4)), line
