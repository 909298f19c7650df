"""The tests of the engines' chunked Mamba2 again: the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest
from kernels.compat.test_compat_chunk_scan import SCANS, check_scan
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import chunk_scan, rows


@pytest.fixture(autouse=True)
def triton_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaline_kernels.compat.build_rows import build_rows
    from deltaline_kernels.mamba2.launch import mamba2_triton

    monkeypatch.setattr(rows, "place_on_host", build_rows)
    monkeypatch.setattr(chunk_scan, "run_mamba2", mamba2_triton)


@pytest.mark.parametrize(
    "scan",
    [
        "empty-middle",
        "all-empty",
        "fresh-and-empty",
        "no-skip-no-bias",
        "gated-skip-per-channel",
        "limits-of-steps-as-they-come",
        "pool-of-16-bits",
        "tokens-before",
        "wide",
    ],
)
def test_scan_matches_the_reference(path: InterpretedPath, scan: str) -> None:
    check_scan(SCANS[scan], path)
