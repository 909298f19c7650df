"""The code that Triton makes of the combine of short rows for a Hopper GPU; it is compiled here and runs nowhere."""

from __future__ import annotations

import os
import re

import pytest
import torch
from rigs.kernels.compiled import compile_launches

from deltaline_kernels import Modifiers, Rows, find_modifier, flex_decode

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)


@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_a_program_asks_its_own_row_before_it_waits(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Of a row with one split it has loaded four numbers, none of which it needed for another, and ends."""
    pytest.importorskip("triton")

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = Rows(draw(7, num_rows + 1, dtype=torch.int32), num_rows, 1, 1)
    pages, table = draw(8 * num_rows, 64, 4, 256), draw(num_rows + 1, 512, dtype=torch.int32)
    causal = Modifiers(mask=find_modifier("causal")(), device="meta")
    q, gate = draw(num_rows, 24, 256), draw(num_rows, 24, 256)
    _, kernel = compile_launches(
        monkeypatch, lambda: flex_decode(q, pages, pages, table, rows, modifiers=causal, gate=gate)
    )
    assert kernel.metadata.name == "combine_kernel"
    assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])
    code = kernel.asm["ttir"]
    look = code[code.index("scf.for") : code.index("scf.if")]
    assert "wait" not in look and "wait" in code
    # One number each, and none of other rows.
    assert set(re.findall(r"tt\.load .* : (\S+)", look)) <= {"!tt.ptr<i32>", "tensor<1x!tt.ptr<i32>>"}
    loaded = set[str]()
    for name, what in re.findall(r"(%\S+) = (.*)", look):
        needs_a_load = bool(loaded & set(re.findall(r"%\w+", what)))
        assert not (needs_a_load and what.startswith("tt.load")), what
        if needs_a_load or what.startswith("tt.load"):
            loaded.add(name)
