"""The code that the walks of Mamba2 become on a Hopper GPU, for which they are compiled here."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from functools import cache

import pytest
import torch
from rigs.kernels.batches import Row
from rigs.kernels.compiled import (
    PRODUCT,
    WAIT,
    compile_launches,
    find_overwritten_operands,
    instructions,
    on_meta,
)
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.walks import ALIGNED, cut_rows

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
LOCAL = re.compile(r"\b(LDL|STL)\b")
# With a condition: without one it leads back from a wait.
BRANCH = re.compile(r"^@\S+ BRA 0x([0-9a-f]+)$")
# Bytes of an instruction.
SIZE = 16
# Of a chunk, and of the rest of a row, where each is waited for alone; of a pair of blocks each has its own. A single
# one has the first chunk's C B^T before the loop, and in it a wait of the assembler's.
NUM_PRODUCTS = {"single": 9, "pairs": 16}
NUM_WAITS = {"single": 9, "pairs": 14}
WALKS = list(NUM_PRODUCTS)


@cache
def compile_long(walk: str) -> dict[str, list[str]]:
    """Return the instructions of what a long row in parts launches, by its name, with single blocks or pairs."""
    chunk = pytest.importorskip("deltaline_kernels.mamba2.chunk", reason="triton is not installed")
    hopper_chunk = pytest.importorskip("deltaline_kernels.mamba2.hopper_chunk")
    layer = MambaLayer(H=128, G=8, P=64, S=128)
    batch = make_mamba_batch([Row(70)], Path("cpu", torch.bfloat16), layer, padding=ALIGNED, max_short=1)
    moved = batch.replaced(**{field.name: on_meta(getattr(batch, field.name)) for field in fields(batch)})
    with pytest.MonkeyPatch.context() as patch:
        cut_rows(patch, chunk, 64)
        patch.setattr(hopper_chunk, "MANY_BLOCKS", 1 if walk == "pairs" else 1000)
        kernels = compile_launches(patch, moved.run_public)
    return {kernel.metadata.name: instructions(kernel) for kernel in kernels}


def find_loops(code: list[str]) -> list[list[str]]:
    """Return what lies between a branch backwards and where it leads, if products do."""
    found = []
    for place, line in enumerate(code):
        if branch := BRANCH.search(line):
            body = code[int(branch[1], 16) // SIZE : place]
            found += [body] if any("HGMMA" in line for line in body) else []
    return found


@pytest.mark.parametrize("walk", WALKS)
def test_long_rows_in_parts_take_the_walk_for_hopper(walk: str) -> None:
    assert list(compile_long(walk)) == ["_sum_steps", "_walk", "walk_kernel"]


@pytest.mark.parametrize("walk", WALKS)
def test_walks_spill_nothing_on_their_way(walk: str) -> None:
    loops = find_loops(compile_long(walk)["walk_kernel"])
    assert len(loops) == (2 if walk == "pairs" else 1)
    assert not [line for loop in loops for line in loop if LOCAL.search(line)]


@pytest.mark.parametrize("walk", WALKS)
def test_walks_wait_where_they_say(walk: str) -> None:
    code = compile_long(walk)["walk_kernel"]
    assert len([line for line in code if "HGMMA" in line and "gsb0" in line]) == NUM_PRODUCTS[walk]
    assert len([line for line in code if WAIT.search(line)]) == NUM_WAITS[walk]


@pytest.mark.parametrize("walk", WALKS)
def test_walks_overwrite_no_operand_of_a_running_product(walk: str) -> None:
    code = compile_long(walk)["walk_kernel"]
    assert [line for line in code if PRODUCT.search(line)] and not find_overwritten_operands(code)
