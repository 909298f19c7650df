"""Parts of the self-test at once: what several of them launch is compiled once, and what fails is told."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from rigs.kernels.compiled import HOPPER, AbsentDriver
from triton import knobs
from triton.runtime import jit

from deltaline_kernels.selftest.threads import run_in_threads

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none"
)
CPU = torch.device("cpu")
PARTS = 6


def store(x, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x, VALUE)


def test_what_several_parts_launch_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, together = list[Any](), threading.Barrier(PARTS)
    kernel, x = jit.JITFunction(store), torch.empty(1, device="meta")
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=AbsentDriver(HOPPER)))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: compiled.append(told["metadata"]["name"]))

    def launch(part: Any, number: int) -> Any:
        together.wait(60)
        coming = kernel.warmup(x, number % 2, grid=(1,))
        return (coming.result() if hasattr(coming, "result") else coming).hash  # as a launch does

    found = run_in_threads(launch, [None] * PARTS, 2, CPU)  # type: ignore[list-item]
    assert found == found[:2] * (PARTS // 2) and found[0] != found[1]
    assert len(compiled) == 2


def test_what_a_part_raises_is_raised_once_all_are_over() -> None:
    done = list[int]()

    def run(part: Any, number: int) -> None:
        if number == 1:
            raise ValueError("wrong")
        done.append(number)

    with pytest.raises(ValueError, match="wrong"):
        run_in_threads(run, [None] * PARTS, 2, CPU)  # type: ignore[list-item]
    assert sorted(done) == [0, 2, 3, 4, 5]
