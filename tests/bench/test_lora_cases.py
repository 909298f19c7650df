"""The cases of LoRA on small shapes: work counted by hand, our sides agree with the bench's own truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.fakes import FakeTimer

from deltaline_bench.__main__ import main
from deltaline_bench.bar import Kind
from deltaline_bench.lora.batch import Batch, Shape
from deltaline_bench.lora.cases import ROWS, SUITE, Row
from deltaline_bench.lora.field import peers
from deltaline_bench.measurement import measure_case
from deltaline_bench.peers import Peers
from deltaline_bench.record import RunRecord, Status
from deltaline_kernels import LoraWeights, add_lora_reference

CPU = torch.device("cpu")
SHAPES = {
    "one": Shape(1, 24, (40,), (4,), 4, torch.float32),
    "slices": Shape(20, 24, (16, 8, 3), (4, 1, 8), 8, torch.float32),
    "prefill": Shape(300, 24, (40,), (4, 8), 8, torch.float32),
    "base": Shape(5, 24, (40,), (), 4, torch.float32),
    "bf16": Shape(20, 24, (40,), (4, 8), 8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_our_sides_agree_with_the_truth_of_the_bench(name: str) -> None:
    record = measure_case(Row(name, "", SHAPES[name])(CPU, Peers()), FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    own = [side for side in record.sides if side.is_ours]
    assert len(own) == 3 and all(side.status is Status.RIGHT for side in own), own


def test_truth_agrees_with_the_kernels_reference() -> None:
    shape = SHAPES["slices"]
    batch = Batch(shape, "reference", CPU)
    ranks = torch.tensor([[rank] * 3 for rank in shape.ranks], dtype=torch.int32)
    weights = LoraWeights(batch.a, batch.b, ranks, torch.full((3, 3), 2.0), shape.sizes)
    out = batch.new_out()
    add_lora_reference(batch.x, out, weights, batch.token_slots)
    torch.testing.assert_close(out, batch.expected()["out"], rtol=1e-5, atol=1e-5)
    assert not torch.equal(out, batch.first_out)


def test_least_work_is_counted() -> None:
    # 20 tokens of 24 inputs and 2 x 27 outputs; 13 ranks of 3 x 24 inputs and 27 outputs.
    assert SHAPES["slices"].num_bytes() == 4 * (20 * (24 + 2 * 27) + 13 * (3 * 24 + 27))
    # 7, 7 and 6 tokens of the three adapters.
    assert SHAPES["slices"].num_flops() == 2 * (7 * 4 + 7 * 1 + 6 * 8) * (3 * 24 + 27)
    assert (SHAPES["base"].num_bytes(), SHAPES["base"].num_flops()) == (0, 0)


def test_adapters_of_a_prefill_have_neighbouring_tokens() -> None:
    slots = Batch(SHAPES["prefill"], "slots", CPU).token_slots.tolist()
    assert slots == sorted(slots) and set(slots) == {0, 1}
    assert Batch(SHAPES["slices"], "slots", CPU).token_slots.tolist()[:4] == [0, 1, 2, 0]


def test_cases_have_their_own_names_and_the_bars_of_the_table() -> None:
    assert [row.name for row in ROWS] == [*dict.fromkeys(row.name for row in ROWS)] == list(SUITE.cases)
    wanted = {"r16-1-of-1", "r16-64-of-16", "r16-256-of-64", "r16-8192-of-8", "r64-256-of-64", "base-64"}
    assert wanted <= set(SUITE.cases)
    for row in ROWS:
        for needed, aim in zip(row.needed, row.aim, strict=False):
            assert needed.kind is aim.kind is Kind.TIME and aim.value < needed.value, row.name


def test_peers_that_are_not_installed_are_rows_of_the_report() -> None:
    record = measure_case(Row("one", "", SHAPES["one"])(CPU, Peers()), FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)
    others = [side for side in record.sides if not side.is_ours]
    assert {side.name for side in others} == set(peers(Batch(SHAPES["one"], "one", CPU), Peers()))
    assert all(side.status in (Status.MISSING, Status.FAILED) for side in others)


@pytest.mark.gpu
def test_suite_runs_end_to_end(tmp_path: Path) -> None:
    arguments = ["lora", "--case", "r16-1-of-1", "--case", "base-64", "--rounds", "3", "--output", str(tmp_path)]
    assert main(arguments) in (0, 1)
    (path,) = tmp_path.glob("*-lora-partial.json")
    for case in RunRecord.from_json(path.read_text(encoding="utf-8")).cases:
        assert case.judged.status is Status.RIGHT, case.judged
        assert case.judged.is_captured
