"""The paths of these tests: the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from rigs.in_turns import cases_by_test, take_every, values_of
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import chunk_scan, flex, lora, mamba2, rows, selective_scan, slots
from deltaline_kernels.compat.delta_rule import gate, sequences

# Of the cases in fp32 of a test so many are one that runs by default.
STEP = 4


def pytest_ignore_collect(collection_path: FilePath) -> bool | None:
    """Leave this folder out unless the interpreter is on, which is decided before triton is imported."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where the interpreter is wrong, and leave most of their cases to sweeps: the
    interpreter takes a thousand times as long as a GPU, on which all of them run."""
    own = [item for item in items if FilePath(__file__).parent in item.path.parents]
    if release("triton") < (3, 7) and release("numpy") >= (2, 5):
        reason = "the interpreter of Triton before 3.7 can't loop to a bound from memory with NumPy 2.5 or later"
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))
    leave_fp16_to_sweeps(own)
    for cases in cases_by_test(item for item in own if not is_fp16(item)):
        take_every(cases, STEP)


def is_fp16(item: pytest.Item) -> bool:
    path = values_of(item).get("path")
    return isinstance(path, InterpretedPath) and path.dtype is torch.float16


def leave_fp16_to_sweeps(items: list[pytest.Item]) -> None:
    """Run one case in fp16 of each test: what differs from fp32 are its casts, and they are the same in all cases."""
    seen = set[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if not is_fp16(item):
            continue
        if test in seen:
            item.add_marker(pytest.mark.sweep)
        seen.add(test)


def release(package: str) -> tuple[int, ...]:
    """Major and minor version of an installed package."""
    return tuple(int(part) for part in version(package).split(".")[:2])


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter(pytestconfig: pytest.Config) -> Iterator[None]:
    """Leave out half of the interpreter's work: it is not the kernels'.

    A sum of integers is computed three times more to see whether it overflows, which compiled code does not check. An
    inlined function is called after a look through all of triton.language for what has to be replaced: a launch has
    replaced that, and what Triton's own functions use stays replaced once they have run. --all leaves nothing out.
    """
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

    first, seen = InterpretedFunction.__call__, set[InterpretedFunction[Any]]()

    def call(self: InterpretedFunction[Any], *arguments: Any, **keywords: Any) -> Any:
        if self in seen:
            return self.rewrite()(*arguments, **keywords)
        seen.add(self)
        return first(self, *arguments, **keywords)

    if pytestconfig.getoption("--all"):
        yield
        return
    options = replace(interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "options", options)
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat what engines' functions are given as a GPU's: to the Triton kernels, without a look at index tensors."""
    from deltaline_kernels.compat.build_rows import build_rows
    from deltaline_kernels.compat.conv1d import by_device
    from deltaline_kernels.compat.conv1d.launch import convolve_triton
    from deltaline_kernels.compat.lora.launch import expand_triton, shrink_triton
    from deltaline_kernels.gated_delta.launch import gated_delta_triton
    from deltaline_kernels.kda.decay_kernel import find_decays_triton
    from deltaline_kernels.kda.launch import kda_triton
    from deltaline_kernels.mamba1.recurrent import mamba1_triton
    from deltaline_kernels.mamba2.launch import mamba2_triton

    monkeypatch.setattr(rows, "place_on_host", build_rows)
    monkeypatch.setattr(by_device, "convolve_cpu", convolve_triton)
    monkeypatch.setattr(sequences, "run_gated_delta", gated_delta_triton)
    monkeypatch.setattr(sequences, "run_kda", kda_triton)
    monkeypatch.setattr(gate, "find_decays", find_decays_triton)
    monkeypatch.setattr(flex, "attend_cpu", flex.attend_triton)
    monkeypatch.setattr(lora, "shrink_cpu", shrink_triton)
    monkeypatch.setattr(lora, "expand_cpu", expand_triton)
    for module in (mamba2, chunk_scan):
        monkeypatch.setattr(module, "run_mamba2", mamba2_triton)
    for module in (mamba2, selective_scan):
        monkeypatch.setattr(module, "run_mamba1", mamba1_triton)
    for module in (sequences, mamba2, selective_scan, slots):
        monkeypatch.setattr(module, "check_contents", lambda *_: None)


@pytest.fixture(
    params=[
        pytest.param(InterpretedPath("cpu", torch.float32), id="fp32"),
        pytest.param(InterpretedPath("cpu", torch.float16), id="fp16"),
    ]
)
def path(request: pytest.FixtureRequest) -> InterpretedPath:
    """Both dtypes that the interpreter computes dots with."""
    chosen: InterpretedPath = request.param
    return chosen


@pytest.fixture
def exact_path() -> InterpretedPath:
    """fp32, for tests that compare two ways of computing the same."""
    return InterpretedPath("cpu", torch.float32)
