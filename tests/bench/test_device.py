"""The processor of a figure is named by its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaline_bench.device import describe_cpu

XEON = """processor : 0
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor : 1
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
"""
EPYC = "model name\t: AMD EPYC 7B12\nflags\t\t: fpu avx avx2 fma\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\n"


@pytest.mark.parametrize(
    ("text", "model", "extensions"),
    [
        (XEON, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "AVX2 AVX-512 AMX"),
        (EPYC, "AMD EPYC 7B12", "AVX2"),
        (ARM, "machine", "NEON SVE"),
        (None, "machine", "no known extensions"),
    ],
    ids=["all", "AVX2", "ARM", "unknown"],
)
def test_processor_is_named_with_cores_and_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, model: str, extensions: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "machine")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    info = tmp_path / "cpuinfo"
    if text is not None:
        info.write_text(text)
    assert describe_cpu(info) == f"{model}, 8 cores, {extensions}"
