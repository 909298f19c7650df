"""The tests of the engines' Mamba2 again: the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import kernels.compat.test_compat_mamba2 as checks
import pytest
from kernels.compat.test_compat_chunk_scan import SCANS, check_scan
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import mamba2, rows


@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "without-indices",
        "ragged",
        "padding-with-a-gate",
        "padding-of-vllm",
        "padding-of-another-slot",
        "no-rows",
        "groups",
        "plain",
        "outputs-of-fp32",
        "groups-of-fp32",
        "first-column-of-a-table",
    ],
)
def test_update_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_update_matches_the_reference(path, name)


@pytest.mark.parametrize("name", ["verify-of-one-token", "ragged", "counts-out-of-range", "padding-of-vllm"])
def test_update_of_a_table_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_update_of_a_table_matches_the_reference(path, name)


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
        "groups-of-fp32",
        "wide",
    ],
)
def test_scan_matches_the_reference(path: InterpretedPath, scan: str) -> None:
    check_scan(SCANS[scan], path)
