"""run_selftest: passes on a sound device, and says which family is wrong on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.paths import Path

from deltaline_kernels import attention_selftest, flex_decode, gated_rms_norm, mamba2, run_selftest, selftest


def test_selftest_passes(path: Path) -> None:
    checks = run_selftest(path.device, path.dtype)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == {"conv1d", "gated_delta", "lora", "norm"}


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_heads": 1, "num_value_heads": 3, "key_dim": 24, "value_dim": 40, "conv_width": 2, "max_draft": 1},
        {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128, "max_draft": 8},
        {"state_dtype": torch.bfloat16},
    ],
    ids=["odd", "large", "bf16-state"],
)
def test_selftest_takes_the_sizes_of_a_model(path: Path, sizes: dict[str, Any]) -> None:
    assert [check for check in run_selftest(path.device, path.dtype, **sizes) if not check.ok] == []


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 24, "value_dim": 40, "conv_width": 2, "max_draft": 1},
        {"num_key_heads": 1, "num_value_heads": 16, "key_dim": 128, "value_dim": 64, "state_dtype": torch.bfloat16},
    ],
    ids=["usual", "odd", "bf16-state"],
)
def test_selftest_takes_a_mamba2_model(path: Path, sizes: dict[str, Any]) -> None:
    checks = run_selftest(path.device, path.dtype, recurrence="mamba2", **sizes)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == {"conv1d", "mamba2", "lora", "norm"}


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 64, "rotary_dim": 16},
        {"num_key_heads": 1, "num_value_heads": 7, "key_dim": 96, "rotary_dim": 96, "page_size": 16, "max_draft": 1},
    ],
    ids=["usual", "odd"],
)
def test_selftest_takes_a_model_of_attention(path: Path, sizes: dict[str, Any]) -> None:
    checks = run_selftest(path.device, path.dtype, recurrence="attention", **sizes)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == {"rotary", "attention", "lora"}


@pytest.mark.parametrize("wrong", [1.0, torch.nan], ids=["shifted", "nan"])
def test_selftest_names_a_wrong_attention(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    monkeypatch.setattr(
        attention_selftest, "flex_decode", lambda *args, **kw: torch.as_tensor(flex_decode(*args, **kw)) + wrong
    )
    failed = {check.name.split(",")[0] for check in run_selftest("cpu", recurrence="attention") if not check.ok}
    assert failed == {"attention"}


def test_selftest_names_a_wrong_mamba2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "mamba2", lambda *args, **kw: mamba2(*args, **kw) + 1.0)
    failed = {check.name.split(",")[0] for check in run_selftest("cpu", recurrence="mamba2") if not check.ok}
    assert failed == {"mamba2"}
    with pytest.raises(KeyError):
        run_selftest("cpu", recurrence="mamba")


@pytest.mark.parametrize("wrong", [1.0, torch.nan], ids=["shifted", "nan"])
def test_selftest_names_the_wrong_family(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    monkeypatch.setattr(selftest, "gated_rms_norm", lambda *inputs: gated_rms_norm(*inputs) + wrong)
    failed = {check.name.split(",")[0] for check in run_selftest("cpu") if not check.ok}
    assert failed == {"norm"}
