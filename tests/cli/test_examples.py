"""The example orchestrator says in one line what is wrong. Its tokens are tested in tests/e2e."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaline_client import LayerSpan, StepTiming

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    pytest.importorskip("safetensors")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example() -> Any:
    return load("generate")


def test_a_wrong_directory_is_told(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    assert example.main() == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: no checkpoint: expected config.json and *.safetensors\n"


def test_a_missing_server_is_told(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1, "rms_norm_eps": 1e-6}')
    tensors = {"model.embed_tokens.weight": np.zeros((8, 4), np.float32), "model.norm.weight": np.zeros(4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(example, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path), "--server", "127.0.0.1:9"])
    with pytest.raises(SystemExit, match=r"^no server answers at 127.0.0.1:9: start one with `deltaline-server"):
        example.main()


def test_an_interrupt_while_torch_is_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    command = [sys.executable, str(EXAMPLES / "make_checkpoint.py"), str(tmp_path / "made")]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_prompt_is_token_ids(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path), "--prompt", "a b"])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert "--prompt: expected token ids with spaces between, got 'a b'" in capsys.readouterr().err


def test_a_checkpoint_that_can_t_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    command = [sys.executable, str(EXAMPLES / "make_checkpoint.py"), str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True)
    told = f"make_checkpoint: error: [Errno 17] File exists: '{tmp_path / 'made'}'\n"
    assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize("embedding", ["embedding", "embeddings"], ids=["mamba_ssm", "transformers"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["head", "tied"])
def test_the_ends_of_a_mamba2_checkpoint_have_either_name(
    example: Any, tmp_path: Path, embedding: str, is_tied: bool
) -> None:
    from safetensors.numpy import save_file

    config = {"model_type": "mamba2", "num_hidden_layers": 1, "layer_norm_epsilon": 0.5, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    tensors = {
        f"backbone.{embedding}.weight": rows.astype(ml_dtypes.bfloat16),
        "backbone.norm_f.weight": np.full(4, 3, ml_dtypes.bfloat16),
        "backbone.layers.0.norm.weight": np.zeros(4, ml_dtypes.bfloat16),
    }
    if not is_tied:
        tensors["lm_head.weight"] = (-rows).astype(ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    ends = example.Ends(tmp_path)
    assert np.array_equal(ends.embed([5]), rows[5:6]) and ends.embedding.dtype == np.float32
    # As it is stored: not the distance from 1.
    assert np.array_equal(ends.norm, np.full(4, 3.0, np.float32))
    assert np.array_equal(ends.head, rows if is_tied else -rows)
    assert (ends.epsilon, ends.end_tokens) == (0.5, {2})


def test_the_join_of_streams_needs_no_key_that_the_server_does_not_need(example: Any, tmp_path: Path) -> None:
    """A config may leave out `hc_eps`; a weight of 0 and a base of 0 join two streams by halves."""
    from safetensors.numpy import save_file

    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "hc_mult": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": np.eye(4, dtype=np.float32),
        "model.norm.weight": np.zeros(4, np.float32),
        "model.hc_head.hc_fn": np.zeros((2, 8), np.float32),
        "model.hc_head.hc_scale": np.ones(1, np.float32),
        "model.hc_head.hc_base": np.zeros(2, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    ends = example.Ends(tmp_path)
    assert ends.join_epsilon == 1e-6
    assert ends.embed([3], 2).shape == (1, 2, 4)
    assert ends.greedy(np.array([[[0, 3, 0, 0], [0, 0, 4, 0]]], np.float32)) == [2]


def test_heads_of_the_table_stand_apart(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = example.Report(tokens=[[1, 2]], ended_at=[1], steps=1, total_s=1.0, timings=[StepTiming()])
    example.print_table({"plain": report})
    heads, row = capsys.readouterr().out.splitlines()
    columns = ["tokens", "steps", "tokens/s", "accepted", "queue ms", "copy in ms", "compute ms", "copy out ms"]
    assert re.split(" {2,}", heads.strip()) == columns
    assert len(row) == len(heads) and len(row.split()) == 1 + len(columns)


@pytest.mark.parametrize("token", [1, 2], ids=["equal", "different"])
def test_a_comparison_is_announced_before_it_begins(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], token: int
) -> None:
    shown: list[str] = []

    def expected_tokens(*arguments: object) -> list[list[int]]:
        shown.append(capsys.readouterr().out)
        return [[1]]

    report = example.Report(tokens=[[token]], ended_at=[1], steps=1, total_s=1.0, timings=[StepTiming()])
    ends = SimpleNamespace(embedding=range(8), end_tokens=set(), num_layers=1, streams=0)
    changes = {"Ends": lambda _: ends, "check_servers": lambda *_: None, "generate": lambda *_: report}
    for name, change in (changes | {"expected_tokens": expected_tokens}).items():
        monkeypatch.setattr(example, name, change)
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path), "--prompt", "1", "--drafts", "0", "--compare"])
    assert example.main() == (token != 1)
    assert shown[0].endswith(
        "transformers now does the same, without a cache: seconds on a CPU, minutes on a busy one\n"
    )
    out, err = capsys.readouterr()
    assert out == f"plain: 1 of 1 tokens compared, {'all equal' if token == 1 else 'prompts [0] differ'}\n"
    hint = f"if all differ, other weights are served than those of {tmp_path}\n"
    assert err == ("" if token == 1 else hint)


@pytest.mark.parametrize(
    ("spans", "streams", "message"),
    [
        ([[(0, 2)]], 0, r"the servers hold layers \[0, 1\], in this order; expected 0 to 3"),
        ([[(2, 2)], [(0, 2)]], 0, r"the servers hold layers \[2, 3, 0, 1\], in this order; expected 0 to 3"),
        ([[(0, 2), (2, 2)]], 0, "a: expected a server of one span of whole layers, got 2 spans"),
        ([[(0, 4)]], 4, "a: serves 4 residual streams, the checkpoint has none"),
    ],
    ids=["missing", "order", "spans", "streams"],
)
def test_servers_that_do_not_hold_the_model_are_told(
    example: Any, monkeypatch: pytest.MonkeyPatch, spans: list[list[tuple[int, int]]], streams: int, message: str
) -> None:
    infos = iter(
        SimpleNamespace(scope="block", spans=[LayerSpan(first, count, streams, streams) for first, count in own])
        for own in spans
    )

    class FakeClient:
        def __init__(self, address: str, timeout: float) -> None: ...

        def __enter__(self) -> Any:
            return SimpleNamespace(info=lambda: next(infos))

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(example, "Client", FakeClient)
    with pytest.raises(ValueError, match=message):
        example.check_servers(["a", "b"][: len(spans)], 4, 0)


def test_an_adapter_is_made_for_every_projection(tmp_path: Path) -> None:
    make_adapter = load("make_adapter").make_adapter
    from safetensors.numpy import load_file, save_file

    projections = ["linear_attn.in_proj_qkv", "linear_attn.out_proj", "self_attn.q_proj", "mlp.down_proj"]
    weights = {f"model.layers.{i}.{name}.weight": np.zeros((6, 4)) for i, name in enumerate(projections)}
    weights["backbone.layers.0.mixer.in_proj.weight"] = weights["model.layers.0.linear_attn.norm.weight"] = np.zeros(
        (6, 4)
    )
    save_file(weights, tmp_path / "model.safetensors")
    make_adapter(tmp_path, tmp_path / "adapter", rank=2)
    modules = {"in_proj_qkv", "out_proj", "q_proj", "down_proj", "in_proj"}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == modules and config["r"] == 2
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in held} == modules
    assert {tensor.shape for tensor in held.values()} == {(2, 4), (6, 2)}
    modes = {path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1, "every file as the umask says"


def test_a_model_without_projections_gets_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected projections of mixers or of an mlp"):
        load("make_adapter").make_adapter(tmp_path, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
