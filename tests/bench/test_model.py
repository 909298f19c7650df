"""The model bench: the least that a model must do by hand, its batches on a CPU, and made-up figures judged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import model
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rigs.small_models import JAMBA, KIMI, LFM2, MAMBA1

from deltaline_bench.model.figures import Decode, Prefill, Run, judge, write_table
from deltaline_bench.model.products import Products
from deltaline_bench.model.profile import Launch, totals, write_profile
from deltaline_bench.model.served import ServedModel
from deltaline_bench.model.shapes import DENSE_27B, EXPERTS_35B, FP8, NAMED, Shape
from deltaline_bench.model.walk import Steps
from deltaline_bench.model.work import Work
from deltaline_bench.service.random_steps import Walked, WrongAnswerError, check
from deltaline_client import Row, RowOutcome, RowResult, StepResult
from deltaline_server.batch import StepBatch
from deltaline_server.engine.executor import CpuExecutor, DeviceCounts, Launched
from deltaline_server.log import Progress
from deltaline_server.models.config import ModelConfig

DENSE = DENSE_27B | {
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = DENSE | {
    "model_type": EXPERTS_35B["model_type"],
    "dtype": "bfloat16",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


class Info:
    """Of a server's answer what outputs are like."""

    def output_shape(self) -> tuple[int, ...]:
        return (4,)


RUN = Run(
    shape="27b",
    device="NVIDIA H200",
    date="2026-01-31",
    context=64,
    decodes=(Decode(1, 12.6, 49_000_000_000, 11.5, 13.3), Decode(64, 19.3, 68_000_000_000, 16.0, 13.9)),
    prefill=Prefill(8192, 700.0, 399 * 10**12, 560.0),
    stages={"weights": 3.0, "graphs": 58.0},
    is_whole=True,
    is_drawn=True,
    copy_bytes_per_s=4.26e12,
)


def write(config: dict[str, object], folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_the_work_of_27b_is_that_of_its_sizes() -> None:
    work = Work(ModelConfig.from_mapping(DENSE_27B), itemsize=2)
    mlp = 3 * 5120 * 17408
    linear = 5120 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + 48 * 128 * 5120
    attention = 5120 * (2 * 24 + 2 * 4) * 256 + 24 * 256 * 5120
    values = 64 * mlp + 48 * linear + 16 * attention
    assert work.flops(8192) == 2 * 8192 * values
    # Norms, gates and convolutions are the rest.
    assert 2 * values < work.weight_bytes(1) < 2 * values * 1.001
    state = 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 + 48) * 128 * 2)
    assert work.state_bytes() == state
    token = 16 * 2 * 4 * 256 * 2
    assert work.decode_bytes(3, 64) == work.weight_bytes(3) + 3 * (2 * state + 64 * token + 2 * 5120 * 2)


def test_the_work_of_other_mixers_is_that_of_their_sizes() -> None:
    """Of small layers, a state's bytes, a token's keys and the products of a token, each by hand."""

    def of(config: dict[str, object]) -> tuple[int, int, int]:
        work = Work(ModelConfig.from_mapping(config), itemsize=2)
        return work.state_bytes(), work.token_kv_bytes(), work.flops(1) // 2

    # KDA of 4 heads of 16: q, k, v, b and gates of rank 16. Latents of 24 and 8 behind, kept once, of which 8 heads'
    # keys of 16 and values of 12 are made; 2 of 6 experts and a shared one.
    linear = 64 * (3 * 64 + 4 + 2 * 16) + 2 * 16 * 64 + 64 * 64 + 3 * 96 * 64
    latent = 64 * (8 * 24 + 32) + 24 * 8 * (16 + 12) + 8 * 12 * 64
    assert of(KIMI) == (4 * 4 * 16 * 16 + 2 * 3 * 192, 2 * 32, linear + latent + 6 * 64 + 3 * 3 * 32 * 64)
    # Two Mamba-1 layers of 128 channels with 16 states, time steps of rank 6; a convolution of the channels alone.
    scan = 64 * 2 * 128 + 128 * (6 + 2 * 16) + 6 * 128 + 128 * 64
    assert of(MAMBA1) == (2 * (4 * 128 * 16 + 2 * 3 * 128), 0, 2 * scan)
    # The state of a short convolution of width 3 is two tokens; attention of 8 heads on 2 of 8 channels.
    mixers = (64 * 3 * 64 + 64 * 64) + (64 * (8 + 2 * 2) * 8 + 64 * 64)
    assert of(LFM2) == (2 * 2 * 64, 2 * 2 * 2 * 8, mixers + 2 * 3 * 96 * 64)
    # Mamba-1 and attention; 2 of 6 experts, none of them shared.
    mixers = scan + 64 * (8 + 2 * 2) * 8 + 64 * 64
    assert of(JAMBA) == (4 * 128 * 16 + 2 * 3 * 128, 2 * 2 * 2 * 8, mixers + 3 * 32 * 64 + 6 * 64 + 2 * 3 * 32 * 64)


def test_the_first_layers_alone_are_their_own_work() -> None:
    config = ModelConfig.from_mapping(DENSE_27B)
    whole, first, behind = (Work(config, 2, num_layers=count) for count in (None, 4, 8))
    assert whole.flops(1) == 16 * first.flops(1) and whole.state_bytes() == 16 * first.state_bytes()
    assert behind.weight_bytes(1) == 2 * first.weight_bytes(1)


def test_weights_in_fp8_are_a_byte_and_their_blocks_scales() -> None:
    """All but norms, gates, convolutions and the two projections that stay plain."""
    plain, in_fp8 = (Work(ModelConfig.from_mapping(NAMED[name][0]), itemsize=2) for name in ("27b", "27b-fp8"))
    left = 48 * (2 * 48 * 5120 + 4 * (2 * 16 + 48) * 128 + 2 * 48 + 128) + 64 * 2 * 5120 + 16 * 2 * 256
    values = plain.weight_bytes(1) // 2 - left
    assert in_fp8.weight_bytes(1) == pytest.approx(2 * left + values * (1 + 1 / 4096), rel=1e-9)
    assert in_fp8.flops(8192) == plain.flops(8192)


def test_of_experts_those_count_that_tokens_choose() -> None:
    work = Work(ModelConfig.from_mapping(EXPERTS_35B), itemsize=2)
    experts = 40 * 3 * 256 * 512 * 2048 * 2
    rest = work.weight_bytes(1_000_000) - experts
    assert work.weight_bytes(1) == pytest.approx(rest + experts * 8 / 256, rel=1e-9)
    chosen = np.random.default_rng(0).random((200, 64, 256)).argsort(axis=2)[:, :, :8]
    touched = np.mean([len(np.unique(one)) for one in chosen]) / 256
    assert work.weight_bytes(64) == pytest.approx(rest + experts * touched, rel=2e-3)


@pytest.mark.parametrize(("config", "mlp"), [(DENSE, 3 * 96 * 64), (EXPERTS, 9 * 64 + 3 * 3 * 32 * 64)])
def test_products_alone_are_as_many_as_the_work_says(
    config: dict[str, object], mlp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, tokens, done = Work(ModelConfig.from_mapping(config), itemsize=2), 5, 0
    compute = Products(work, torch.bfloat16, torch.device("cpu")).call(tokens)
    torch_linear, torch_grouped = F.linear, F.grouped_mm

    def count_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += 2 * len(x) * weight.numel()
        return torch_linear(x, weight)

    def count_grouped(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        nonlocal done
        assert offs[-1] == len(x)  # each row has an expert
        done += 2 * len(x) * weight[0].numel()
        return torch_grouped(x, weight, offs=offs)

    monkeypatch.setattr(F, "linear", count_linear)
    monkeypatch.setattr(F, "grouped_mm", count_grouped)
    assert torch.isfinite(compute()).all()
    linear, attention = 64 * (64 + 2 * 64 + 2 * 4) + 64 * 64, 64 * (2 * 4 + 2) * 32 + 4 * 32 * 64
    assert done == work.flops(tokens) == 2 * tokens * (3 * linear + attention + 4 * mlp)


@pytest.mark.parametrize("config", [DENSE, EXPERTS, EXPERTS | FP8], ids=["dense", "experts", "fp8"])
def test_batches_are_rows_with_lines_and_pages_of_their_own(config: dict[str, object], tmp_path: Path) -> None:
    served = ServedModel.build(Shape("tiny", write(config, tmp_path)), [1, 3], 150, Progress())
    assert served.pool.kv is not None
    assert served.pool.kv.num_pages < 3 * 150 // 64 + 3
    decode = served.decode(3)
    assert decode.control[1:3].tolist() == [[1, 2, 3, 0]] * 2
    assert decode.control[6].tolist() == [63, 63, 63, 0]
    assert served.compute(decode) > 0
    table = served.pool.page_table
    assert table is not None
    assert table[1:4, 0].tolist() == [1, 2, 3]
    written = [layer for layer in served.pool.layers if hasattr(layer, "recurrent")]
    assert written
    assert all(layer.recurrent[1:4].abs().sum(dim=(1, 2, 3)).all() for layer in written)
    prefill = served.prefill(150)
    assert (prefill.num_tokens, prefill.num_short) == (150, 0)
    assert served.compute(prefill) > 0
    assert table[1, :3].tolist() == [1, 2, 3]


def test_a_batch_that_is_not_finite_is_no_measurement(tmp_path: Path) -> None:
    served = ServedModel.build(Shape("tiny", write(DENSE, tmp_path)), [2], 64, Progress())
    batch = served.decode(2)
    batch.hidden[0][1] = np.nan
    with pytest.raises(RuntimeError, match="expected finite outputs"):
        served.measure(batch, 1)


def test_a_run_on_a_cpu_tells_and_keeps_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "ROUNDS", 2)
    config = write(DENSE, tmp_path)
    arguments = [str(config), "--rows", "1,2", "--tokens", "64", "--output", str(tmp_path / "out")]
    assert model.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "prefill of 64 tokens" in printed
    [path] = (tmp_path / "out").glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))["run"]
    assert [one["rows"] for one in found["decodes"]] == [1, 2]
    assert all(one["compute_ms"] > 0 for one in found["decodes"])
    assert found["copy_bytes_per_s"] is None
    assert set(found["stages"]) == {"weights", "kernels", "state", "graphs"}
    assert path.with_suffix(".txt").read_text(encoding="utf-8").strip() in printed


@pytest.mark.parametrize("config", [DENSE, KIMI, JAMBA, LFM2], ids=["dense", "kimi", "jamba", "lfm2"])
def test_random_steps_are_served_and_judged(
    config: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(write(config, tmp_path)), "--random-steps", "40", "--rows", "6", "--tokens", "80", "--layers", "2"]
    assert model.main([*arguments, "--seed", "1"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert "-2-layers, cpu: 40 random steps in " in line and line.endswith("met (bar: 0)")
    counts = [int(count) for count in re.findall(r"(\d+) (?:prefills|decodes|verifies|commits|sequences closed)", line)]
    assert len(counts) == 5 and min(counts) > 0
    # The same seed is the same walk.
    assert model.main([*arguments, "--seed", "1"]) == 0
    again = re.search(r"finite: .* closed", capsys.readouterr().out)
    assert again is not None and again[0] in line


@pytest.mark.parametrize("grown", [1.0, None])
def test_random_steps_miss_what_grew_or_nobody_tells(grown: float | None) -> None:
    still: dict[str, float | None] = {"compilations": 0.0, "device allocations": 0.0}
    walked = Walked(seconds=[0.001, 0.003])
    assert Steps("27b", "cpu", 1.0, walked, still).is_steady
    steps = Steps("27b", "cpu", 1.0, walked, still | {"graph captures": grown})
    assert not steps.is_steady and str(steps).endswith("MISSED (bar: 0)")


def test_what_compiles_once_a_server_is_ready_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted one: an executor that counts a compilation with every batch."""
    compiled = 0
    launch = CpuExecutor.launch

    def launching(executor: CpuExecutor, batch: StepBatch) -> Launched:
        nonlocal compiled
        compiled += 1
        return launch(executor, batch)

    monkeypatch.setattr(CpuExecutor, "launch", launching)
    monkeypatch.setattr(CpuExecutor, "counts", lambda _: DeviceCounts(compilations=compiled))
    assert model.main([str(write(DENSE, tmp_path)), "--random-steps", "5", "--rows", "2", "--tokens", "64"]) == 1


@pytest.mark.parametrize("wrong", ["not finite", "too short", "refused"])
def test_an_answer_that_is_wrong_ends_random_steps(wrong: str) -> None:
    info: Any = Info()
    hidden = np.ones((3, 4), np.float32)
    output = np.full((3, 4), np.nan if wrong == "not finite" else 1.0, np.float32)[: 2 if wrong == "too short" else 3]
    outcome = RowOutcome.REFUSED if wrong == "refused" else RowOutcome.EXECUTED
    sequence: Any = None
    timing: Any = None
    answer = StepResult([RowResult(sequence, outcome, output, 3, 3, None)], timing)
    with pytest.raises(WrongAnswerError, match="row 0 of 3 tokens: expected to be applied, with finite outputs"):
        check([Row.prefill(sequence, hidden)], answer, "all", info)
    right = answer.rows[0]._replace(outcome=RowOutcome.EXECUTED, output=np.ones((3, 4), np.float32))
    check([Row.prefill(sequence, hidden)], StepResult([right], timing), "all", info)


def test_what_cant_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([str(tmp_path / "missing.json")]) == 1
    assert "error: " in capsys.readouterr().err
    beside = ["--random-steps", "1", "--output", "x"]
    for wrong in (["--rows", "0"], ["--rows", "x"], ["--profile", "3"], ["--random-steps", "0"], beside):
        with pytest.raises(SystemExit):
            model.main(["27b", *wrong])


def test_figures_are_held_to_bars_and_aims() -> None:
    bars = NAMED["27b"][1]
    found = {(one.name, one.is_aim): one.is_met for one in judge(RUN, bars)}
    assert found == {
        ("decode of 1, ms", False): True,
        ("decode of 1, ms", True): True,
        ("decode of 64, ms", False): False,
        ("decode of 64, ms", True): False,
        ("prefill, products / computation", False): True,
        ("prefill, products / computation", True): False,
        ("ready, s", False): False,
    }
    part = replace(RUN, is_whole=False)
    assert "ready, s" not in {one.name for one in judge(part, bars)}
    files = {one.name: one for one in judge(replace(RUN, is_drawn=False), bars)}
    assert files["ready, s"].is_met
    shares = {one.name: one.is_met for one in judge(RUN, NAMED["35b-a3b"][1])}
    assert shares == {"decode of 1, bytes / computation": True, "decode of 64, bytes / computation": True}
    table = write_table(RUN)
    assert "0.913" in table
    assert "0.800" in table
    assert "ready after 61.0 s: weights 3.0, graphs 58.0" in table


def test_a_profile_adds_up_launches_and_what_was_waited_for_before_them() -> None:
    launches = [Launch("a", 10, 14), Launch("b", 15, 25), Launch("a", 20, 22), Launch("a", 28, 30)]
    found = totals(launches)
    assert vars(found["a"]) == {"count": 3, "busy_us": 8, "idle_us": 3}
    assert vars(found["b"]) == {"count": 1, "busy_us": 10, "idle_us": 1}
    text = write_profile(launches, most=1)
    assert text.startswith("4 launches in 20 us: busy for 18 us, and the device waited 4 us")
    assert "1 others" in text
    assert write_profile([]) == "profile: the profiler saw no kernel"
