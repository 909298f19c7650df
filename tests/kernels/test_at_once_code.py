"""The code that short rows, computed at once, become on a Hopper GPU, for which their kernels are compiled here."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from rigs.kernels.batches import Layer, Recurrent, Row, make_batch
from rigs.kernels.compiled import compile_launches, on_meta, scans_of_repeated_columns
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.walks import ALIGNED

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
ROWS = [Row(5, verify=True, replayed=3)] * 8
CPU = Path("cpu", torch.bfloat16)
# With as many heads as have programs of several parts of the state, where a family has such.
BATCHES: dict[str, Callable[[], Recurrent]] = {
    "gated_delta": lambda: make_batch(ROWS, CPU, Layer(H=16, HV=32, K=128, V=128, M=5), padding=ALIGNED),
    "kda": lambda: make_kda_batch(ROWS, CPU, KdaLayer(H=16, HV=32, K=128, V=128, M=5), padding=ALIGNED),
    "mamba2": lambda: make_mamba_batch(ROWS, CPU, MambaLayer(H=32, G=2, S=128, P=64, M=5), padding=ALIGNED),
}


@pytest.mark.parametrize("family", BATCHES)
def test_products_of_short_rows_take_the_state_as_it_was_loaded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fp32 states: no operand is moved, only outputs and keys go through shared memory.

    From the first load of a state on nothing goes through local memory until the products are there; what is known of a
    row may be put away for that time.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    batch = BATCHES[family]()
    moved = batch.replaced(**{name: on_meta(value) for name, value in vars(batch).items()})
    *before, kernel = compile_launches(monkeypatch, moved.run_public)
    assert "mma.sync" in kernel.asm["ptx"] and "wgmma" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 512 and not any(other.metadata.shared for other in before)
    # What an instruction is switched off by stands before it.
    lines = [line.split("\t")[-1].split() for line in kernel.asm["sass"].splitlines() if line.strip()]
    names = [words[words[0].startswith("@")] for words in lines]
    products = [i for i, name in enumerate(names) if name == "HMMA.1688.F32.TF32"]
    since_loads = names[names.index("LDG.E.128") : products[-1]]
    assert not {"LDL", "STL"} & {name.split(".")[0] for name in since_loads}
    between = names[products[0] : products[-1]]
    assert not {"LDS", "LDSM", "STS"} & {name.split(".")[0] for name in between}
    # A copy, or an exchange between threads of what is then chosen from.
    moves = sum(name in ("MOV", "SEL") or name.startswith(("IMAD.MOV", "SHFL")) for name in between)
    assert len(products) >= 64 and moves < len(products) / 8


@pytest.mark.parametrize("family", ["gated_delta", "mamba2"])
def test_tokens_of_short_rows_do_not_wait_for_the_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads count what is on its way in one of six counters, and who waits for a counter waits for all of its loads."""
    pytest.importorskip("triton", reason="triton is not installed")
    batch = BATCHES[family]()
    moved = batch.replaced(**{name: on_meta(value) for name, value in vars(batch).items()})
    (kernel,) = compile_launches(monkeypatch, moved.run_public)
    # The counters that an instruction waits for, as bits, and the one that counts a load: "21:-:4:-:1<tab>LDG.E ...".
    lines = [line.split("\t") for line in kernel.asm["sass"].splitlines() if "\t" in line]
    waits = [0 if control.startswith("--") else int(control.split(":")[0], 16) for control, _ in lines]
    branch = next(i for i, (_, text) in enumerate(lines) if "BRA" in text)
    states = [i for i, (_, text) in enumerate(lines[:branch]) if "LDG.E.128" in text]
    counters = sum(1 << int(counter) for counter in {lines[i][0].split(":")[2] for i in states})
    products = [i for i, (_, text) in enumerate(lines) if "HMMA.16816.F32.BF16" in text]
    assert len(states) >= 32 and len(products) >= 8
    assert not any(wait & counters for wait in waits[states[-1] : products[-1]])


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no-norms"])
@pytest.mark.parametrize("gates", [True, False], ids=["gates", "raw-gates"])
def test_every_kind_of_short_rows_is_compiled_right(gates: bool, norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other inputs the compiler chooses other layouts, in one of which a scan was wrong."""
    pytest.importorskip("triton", reason="triton is not installed")
    batch = make_batch(ROWS[:2], CPU, Layer(H=1, HV=1, K=64, V=20, M=8))
    batch = batch if gates else batch.with_raw_gates()
    batch = batch if norms else batch.without_norms()
    moved = batch.replaced(**{name: on_meta(value) for name, value in vars(batch).items()})
    (kernel,) = compile_launches(monkeypatch, moved.run_public)
    assert "mma.sync" in kernel.asm["ptx"]


@pytest.mark.parametrize(("threads", "is_wrong"), [("[2, 16]", True), ("[4, 8]", False)])
def test_a_scan_is_found_in_which_threads_hold_a_column_twice(threads: str, is_wrong: bool) -> None:
    held = f"sizePerThread = [1, 1], threadsPerWarp = {threads}, warpsPerCTA = [1, 1], order = [1, 0]"
    ttgir = f"""#blocked = #ttg.blocked<{{{held}}}>
      %sums = "tt.scan"(%gates) <{{axis = 0 : i32, reverse = false}}> ({{
      ^bb0(%one: f32, %other: f32):
        %both = arith.addf %one, %other : f32
        tt.scan.return %both : f32
      }}) : (tensor<8x8xf32, #blocked>) -> tensor<8x8xf32, #blocked>
"""
    assert bool(scans_of_repeated_columns(ttgir)) == is_wrong
