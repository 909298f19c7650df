"""The example orchestrator says in one line what is wrong. Its tokens are tested in tests/e2e."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"


@pytest.fixture
def example() -> Iterator[Any]:
    pytest.importorskip("safetensors")
    spec = importlib.util.spec_from_file_location("example_errors", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_wrong_directory_is_told(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    assert example.main() == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: no checkpoint: expected config.json and *.safetensors\n"


def test_a_missing_server_is_told(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text('{"layer_types": ["linear_attention"], "rms_norm_eps": 1e-6}')
    tensors = {"model.embed_tokens.weight": np.zeros((8, 4), np.float32), "model.norm.weight": np.zeros(4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(example, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path), "--server", "127.0.0.1:9"])
    with pytest.raises(SystemExit, match=r"^no server answers at 127.0.0.1:9: start one with `deltaline-server"):
        example.main()
