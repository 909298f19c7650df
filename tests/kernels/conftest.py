"""Fixtures of the kernel tests: the paths an operation can take, and memory that starts as NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rigs.kernels.paths import Path


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and torch.empty_like return with NaN, so that an unwritten output shows."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return make_nan

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))


def _gpu(dtype: torch.dtype, name: str) -> Any:
    return pytest.param(Path("cuda", dtype), id=f"cuda-{name}", marks=pytest.mark.gpu)


@pytest.fixture(
    params=[
        pytest.param(Path("cpu", torch.float32), id="cpu-fp32"),
        pytest.param(Path("cpu", torch.bfloat16), id="cpu-bf16"),
        _gpu(torch.float32, "fp32"),
        _gpu(torch.bfloat16, "bf16"),
        _gpu(torch.float16, "fp16"),
    ]
)
def path(request: pytest.FixtureRequest) -> Path:
    """Every device and dtype."""
    chosen: Path = request.param
    return chosen


@pytest.fixture(params=[pytest.param(Path("cpu", torch.float32), id="cpu-fp32"), _gpu(torch.float32, "fp32")])
def exact_path(request: pytest.FixtureRequest) -> Path:
    """Every device in fp32, for tests that compare two ways of computing the same."""
    chosen: Path = request.param
    return chosen


@pytest.fixture(params=[_gpu(torch.bfloat16, "bf16"), _gpu(torch.float16, "fp16")])
def half_path(request: pytest.FixtureRequest) -> Path:
    """The dtypes of 16 bits on a GPU; the interpreter has tests of its own."""
    chosen: Path = request.param
    return chosen
