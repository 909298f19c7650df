"""The tests of the engines' selective state update again: the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import kernels.compat.test_compat_mamba2 as checks
import pytest
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import mamba2, rows


@pytest.fixture(autouse=True)
def interpreted_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat CPU tensors as those of a GPU: the Triton kernels, and no look at what index tensors say."""
    from deltaline_kernels.compat.build_rows import build_rows
    from deltaline_kernels.mamba2.launch import mamba2_triton

    monkeypatch.setattr(rows, "place_on_host", build_rows)
    monkeypatch.setattr(mamba2, "run_mamba2", mamba2_triton)
    monkeypatch.setattr(mamba2, "check_contents", lambda *_: None)


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
        "first-column-of-a-table",
    ],
)
def test_update_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_update_matches_the_reference(path, name)


@pytest.mark.parametrize("name", ["verify-of-one-token", "ragged", "counts-out-of-range", "padding-of-vllm"])
def test_update_of_a_table_matches_the_reference(path: InterpretedPath, name: str) -> None:
    checks.test_update_of_a_table_matches_the_reference(path, name)
