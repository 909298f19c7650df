"""The drift of a bf16 state is measured beside fp64, with a rounding after every token."""

from __future__ import annotations

import drift
import pytest
import torch

from deltaline_bench.error import compare
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.gated_delta.shape import Shape
from deltaline_bench.lines import Mode

CPU = torch.device("cpu")


def test_bf16_state_drifts_and_an_fp32_state_does_not() -> None:
    (first, early), (last, late) = drift.measure("gates near 1", 2 * drift.SEGMENT, CPU)
    assert (first, last) == (drift.SEGMENT, 2 * drift.SEGMENT)
    for o_fp32, o_bf16, fp32, bf16 in (early, late):
        assert fp32 < 2e-6
        # An output is rounded to bf16 once, the state after every token: once alone would cost it 2e-3.
        assert 1e-3 < o_fp32 < 2e-3 < o_bf16 < 5e-2
        assert 5e-3 < bf16 < 5e-2
    assert late[3] > early[3]


def test_table_has_a_row_for_each_kind_of_inputs_and_power_of_ten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drift, "SEGMENT", 10)
    monkeypatch.setattr(drift, "HEADS", (1, 1))
    assert drift.main(["--device", "cpu", "--steps", "120"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert tuple(rows[0]) == drift.COLUMNS
    assert [row[:2] for row in rows[2:]] == [[name, tokens] for name in drift.INPUTS for tokens in ("100", "120")]
    assert all(0 < float(error) < 0.1 for row in rows[2:] for error in row[2:])


def test_arguments_that_cannot_be_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        (["--device", "cpu", "--steps", "0"], "--steps: expected a multiple of 100, got 0"),
        (["--device", "cpu", "--steps", "150"], "--steps: expected a multiple of 100, got 150"),
        ([], "--device cuda: torch finds no CUDA device; try --device cpu"),
    ):
        with pytest.raises(SystemExit, match="2"):
            drift.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_graph_of_launches_decodes_the_tokens_of_each_segment() -> None:
    batch = Batch(Shape(Mode.PREFILL, (2 * drift.SEGMENT,), 1, 2, 64, 64), "graph", torch.device("cuda"))
    decoder = drift.Decoder(batch, torch.float32)
    o = [decoder.decode(first).clone() for first in (0, drift.SEGMENT)]
    expected = batch.expected()
    assert compare({"o": torch.cat(o)}, expected).relative < 3e-3
    assert compare({"state": decoder.state[None]}, expected).relative < 1e-5
