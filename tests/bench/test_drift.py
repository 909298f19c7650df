"""The drift of a bf16 state is measured beside fp64, with a rounding after every token."""

from __future__ import annotations

import drift
import pytest
import torch

from deltaline_bench.error import compare
from deltaline_bench.gated_delta.batch import Batch, Inputs
from deltaline_bench.gated_delta.shape import Mode, Shape

CPU = torch.device("cpu")


def test_bf16_state_drifts_and_an_fp32_state_does_not() -> None:
    (first, early), (last, late) = drift.measure("gates near 1", 2 * drift.SEGMENT, CPU)
    assert (first, last) == (drift.SEGMENT, 2 * drift.SEGMENT)
    for o_fp32, o_bf16, fp32, bf16 in (early, late):
        assert fp32 < 2e-6
        # An output is rounded to bf16 once, the state again and again.
        assert 1e-3 < o_fp32 < 2e-3 < o_bf16 < 5e-2
        assert 5e-3 < bf16 < 5e-2
    assert late[3] > early[3]


def test_bf16_state_is_rounded_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Shape(Mode.PREFILL, (drift.SEGMENT,), 1, 2, 16, 16), "rounded", CPU, Inputs())
    rounded = drift.Decoder(batch, torch.bfloat16)
    rounded.decode(0)
    num_tokens = drift.SEGMENT
    monkeypatch.setattr(drift, "SEGMENT", 1)
    single = drift.Decoder(batch, torch.float32)
    for t in range(num_tokens):
        single.decode(t)
        single.state.copy_(single.state.bfloat16())
    assert single.state.norm() > 0
    torch.testing.assert_close(rounded.state.float(), single.state, rtol=0, atol=0)


def test_table_has_a_row_for_each_kind_of_inputs_and_power_of_ten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drift, "SEGMENT", 10)
    monkeypatch.setattr(drift, "HEADS", (1, 1))
    assert drift.main(["--device", "cpu", "--steps", "120"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert tuple(rows[0]) == drift.COLUMNS
    assert [row[:2] for row in rows[2:]] == [[name, tokens] for name in drift.INPUTS for tokens in ("100", "120")]
    assert all(0 < float(error) < 0.1 for row in rows[2:] for error in row[2:])


@pytest.mark.parametrize("steps", ["0", "150"])
def test_steps_that_are_no_whole_segments_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        drift.main(["--device", "cpu", "--steps", steps])
    assert f"--steps: expected a multiple of 100, got {steps}" in capsys.readouterr().err


def test_missing_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        drift.main([])
    assert "--device cuda: torch finds no CUDA device; try --device cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_graph_of_launches_decodes_the_tokens_of_each_segment() -> None:
    batch = Batch(Shape(Mode.PREFILL, (2 * drift.SEGMENT,), 1, 2, 64, 64), "graph", torch.device("cuda"), Inputs())
    decoder = drift.Decoder(batch, torch.float32)
    o = [decoder.decode(first).clone() for first in (0, drift.SEGMENT)]
    expected = batch.expected()
    assert compare({"o": torch.cat(o)}, expected).relative < 3e-3
    assert compare({"state": decoder.state[None]}, expected).relative < 1e-5
