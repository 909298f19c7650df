"""Triton and its assembler are ones whose faults the kernels are known to avoid: docs/kernels.md, "Triton and its
assembler".
"""

from __future__ import annotations

import re
import subprocess

import pytest

TRITONS, ASSEMBLERS = {"3.6", "3.7"}, {"12.8"}


def test_triton_and_its_assembler_are_known() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler", reason="triton has no backend for NVIDIA")
    assert ".".join(triton.__version__.split(".")[:2]) in TRITONS
    told = subprocess.run([nvidia.get_ptxas(90).path, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+\.\d+)", told)
    assert release and release[1] in ASSEMBLERS, told
