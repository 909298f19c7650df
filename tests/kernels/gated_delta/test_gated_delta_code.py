"""The code that the kernels of long rows become on a Hopper GPU, for which they are compiled here."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from functools import cache
from itertools import pairwise

import pytest
import torch
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.compiled import (
    PRODUCT,
    WAIT,
    compile_launches,
    find_overwritten_operands,
    instructions,
    on_meta,
)
from rigs.kernels.paths import Path
from rigs.kernels.walks import ALIGNED, cut_rows

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
LOCAL = re.compile(r"\b(LDL|STL)\b")
WALKS = pytest.mark.parametrize("name", ["ends_kernel", "walk_kernel"])


@cache
def compile_long() -> dict[str, list[str]]:
    """Return the instructions of what a long row in parts launches, by the kernels' names."""
    chunk = pytest.importorskip("deltaline_kernels.gated_delta.chunk", reason="triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        cut_rows(patch, chunk, 64)
        layer = Layer(H=1, HV=2, K=128, V=128)
        batch = make_batch([Row(1), Row(70)], Path("cpu", torch.bfloat16), layer, padding=ALIGNED, max_short=1)
        moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
        kernels = compile_launches(patch, moved.run_public)
    return {kernel.metadata.name: instructions(kernel) for kernel in kernels}


def test_long_rows_take_the_kernels_for_hopper() -> None:
    assert list(compile_long()) == ["_recurrent", "_transform", "ends_kernel", "_join", "walk_kernel"]


@WALKS
def test_walks_overwrite_no_operand_of_a_running_product(name: str) -> None:
    """The state and the updates are operands in registers, which an assembler may hand to something else too early."""
    code = compile_long()[name]
    assert [line for line in code if PRODUCT.search(line)] and not find_overwritten_operands(code)


@WALKS
def test_products_of_walks_run_beside_other_work(name: str) -> None:
    """Where registers do not suffice the assembler waits for each of them, and state goes through memory."""
    code = compile_long()[name]
    assert len([line for line in code if WAIT.search(line)]) < len([line for line in code if "HGMMA" in line])
    # Groups of warps with roles begin where they change their number of registers.
    begins = [i for i, line in enumerate(code) if "USETMAXREG" in line]
    for begin, end in pairwise([0, *begins, len(code)]):
        products = [i for i in range(begin, end) if "HGMMA" in code[i]]
        assert not products or not [line for line in code[products[0] : products[-1]] if LOCAL.search(line)]
