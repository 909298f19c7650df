"""The gated delta rule's cases on small shapes: work counted by hand, our sides agree with the bench's own truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.fakes import FakeTimer

from deltaline_bench.__main__ import main
from deltaline_bench.bar import Kind
from deltaline_bench.case import CaseMaker, Side, SideMaker
from deltaline_bench.gated_delta import cases
from deltaline_bench.gated_delta.batch import Batch, Inputs
from deltaline_bench.gated_delta.cases import (
    COMPARED,
    DECODE,
    HARD,
    ROWS,
    SUITE,
    AccuracyRow,
    MixerRow,
    Row,
    VerifyRow,
)
from deltaline_bench.gated_delta.field import peers
from deltaline_bench.gated_delta.shape import Mode, Shape
from deltaline_bench.gated_delta.sides import ours, rows_of
from deltaline_bench.gated_delta.truth import Tokens, advance
from deltaline_bench.measurement import measure_case
from deltaline_bench.peers import Peers
from deltaline_bench.record import CaseRecord, RunRecord, Status
from deltaline_kernels import gated_delta_reference

CPU = torch.device("cpu")
PREFILL = Shape(Mode.PREFILL, (3, 70, 1, 64, 130, 3), 2, 4, 16, 24, torch.float32)
DECODE_SHAPE = Shape(Mode.DECODE, (1,) * 5, 2, 4, 16, 24, torch.float32)
VERIFY = Shape(Mode.VERIFY, (3,) * 6, 2, 4, 16, 24, torch.float32)
SMALL: list[tuple[str, CaseMaker]] = [
    ("prefill", Row("prefill", "rows around the chunk", PREFILL, max_error=1e-5)),
    ("alike", Row("alike", "keys alike", PREFILL, inputs=Inputs(0.95, (1e-5, 1e-4), 4.0), max_error=1e-5)),
    ("forget", Row("forget", "gates near 0", PREFILL, inputs=Inputs(step=(1.0, 20.0)), max_error=1e-5)),
    ("decode", Row("decode", "one token", DECODE_SHAPE, max_error=1e-5)),
    ("decode bf16", Row("decode bf16", "bf16 state", replace(DECODE_SHAPE, state=torch.bfloat16))),
    ("mixer", MixerRow(Row("mixer", "the mixer", DECODE_SHAPE, max_error=1e-5))),
    ("mixer bf16", MixerRow(Row("mixer bf16", "the mixer", replace(DECODE_SHAPE, dtype=torch.bfloat16)))),
    ("verify", VerifyRow(Row("verify", "three tokens", VERIFY, max_error=1e-5))),
]


@pytest.mark.parametrize("maker", [maker for _, maker in SMALL], ids=[name for name, _ in SMALL])
def test_our_side_agrees_with_the_truth_of_the_bench(maker: CaseMaker) -> None:
    record = measure_case(maker(CPU, Peers()), FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    assert record.judged.status is Status.RIGHT, record.judged
    beside = [side for side in record.sides if side.name == DECODE]
    assert all(side.status is Status.RIGHT for side in beside), beside
    assert bool(beside) == isinstance(maker, MixerRow | VerifyRow)


def test_truth_agrees_with_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    q, k, v = draw(2, 70, 2, 8), torch.nn.functional.normalize(draw(2, 70, 2, 8), dim=-1), draw(2, 70, 6, 5)
    tokens = Tokens(q, k, v, -draw(2, 70, 6).exp(), draw(2, 70, 6).sigmoid())
    first = draw(2, 6, 5, 8)
    o, after = advance(tokens, first)
    for row in range(2):
        for head in range(6):
            h = first[row, head]
            for t in range(70):
                key = k[row, t, head // 3]
                h = tokens.g[row, t, head].exp() * h
                h = h + torch.outer(tokens.beta[row, t, head] * (v[row, t, head] - h @ key), key)
                torch.testing.assert_close(o[row, t, head], h @ q[row, t, head // 3], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(after[row, head], h, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [PREFILL, VERIFY], ids=["prefill", "verify"])
def test_truth_agrees_with_the_kernels_reference(shape: Shape) -> None:
    batch = Batch(shape, "reference", CPU, Inputs())
    state, drafts = batch.new_state().double(), batch.new_drafts().double()
    inputs = (batch.qkv.double(), batch.a, batch.b, batch.A_log, batch.dt_bias)
    o = gated_delta_reference(*inputs, state, drafts, rows_of(batch), num_key_heads=shape.num_key_heads)
    expected = batch.expected()
    torch.testing.assert_close(o.float(), expected["o"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state[batch.line_index].float(), expected["state"], rtol=1e-5, atol=1e-6)
    if shape.mode is Mode.VERIFY:
        assert len(set(batch.accepted.tolist())) > 1
        kept = drafts[batch.line_index, 1 - batch.half].float()
        torch.testing.assert_close(kept, expected["drafts"], rtol=1e-5, atol=1e-6)
        states = expected["token_states"]
        assert not torch.equal(states[:, -1], states[:, 0])


def test_least_bytes_are_counted() -> None:
    # 8 tokens of 2*2*16 + 4*24 channels, 8 gates and 96 outputs; the second row reads a state, both write one.
    prefill = Shape(Mode.PREFILL, (5, 3), 2, 4, 16, 24)
    assert prefill.num_bytes() == 2 * 8 * (160 + 8 + 96) + 4 * 3 * 4 * 24 * 16 + 4 * 8
    verify = Shape(Mode.VERIFY, (3, 3), 2, 4, 16, 24, state=torch.bfloat16)
    states, drafts = 2 * 2 * 2 * 4 * 24 * 16, 4 * (32 + 96 + 4) * (4 + 6)
    assert verify.num_bytes(num_replayed=4) == 2 * 6 * 264 + states + drafts + 4 * 8


def test_operations_are_counted() -> None:
    prefill = Shape(Mode.PREFILL, (10,), 2, 4, 16, 24)
    products = 2 * 2 * (64 * 16) * 2 + 4 * (3 * 2 * 16 * 24 + 2 * 2 * 64 * 24)
    assert prefill.num_flops() == 10 * products
    assert Shape(Mode.DECODE, (1, 1), 2, 4, 16, 24).num_flops() == 2 * 4 * 7 * 16 * 24


def test_same_name_gives_the_same_inputs() -> None:
    first, second = (Batch(VERIFY, "name", CPU, Inputs()).expected() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_reset_puts_back_what_a_step_wrote() -> None:
    batch = Batch(VERIFY, "reset", CPU, Inputs())
    state, drafts = batch.new_state(), batch.new_drafts()
    state.zero_()
    drafts.zero_()
    batch.reset_state(state)
    batch.reset_drafts(drafts)
    assert torch.equal(state[batch.line_index], batch.states)
    assert torch.equal(drafts[batch.line_index, batch.half], batch.new_drafts()[batch.line_index, batch.half])
    assert batch.new_state()[0].isnan().all()


def test_cases_have_their_own_names_and_the_bars_of_the_table() -> None:
    rows = [*ROWS, *(maker.row for maker in (*HARD, *COMPARED))]
    assert [row.name for row in rows] == [*dict.fromkeys(row.name for row in rows)]
    assert {row.name for row in rows} == set(SUITE.cases)
    wanted = {"prefill-4x8192", "prefill-ragged", "prefill-h2x8", "decode-1", "decode-64-bf16-state", "mixer-256"}
    assert wanted | {"verify-64", "accuracy-alike", "accuracy-100k"} <= set(SUITE.cases)
    assert max(maker.row.shape.num_tokens for maker in HARD) > 100_000
    for row in rows:
        for needed, aim in zip(row.needed, row.aim, strict=False):
            if needed.kind is aim.kind:
                assert aim.value < needed.value if needed.kind is Kind.TIME else aim.value > needed.value, row.name


@pytest.mark.parametrize("shape", [PREFILL, DECODE_SHAPE, VERIFY], ids=["prefill", "decode", "verify"])
def test_peers_that_are_not_installed_are_rows_of_the_report(shape: Shape) -> None:
    case = Row("alone", "no peers", shape)(CPU, Peers())
    record = measure_case(case, FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)
    others = [side for side in record.sides if not side.is_ours]
    assert {side.name for side in others} == set(peers(Batch(shape, "alone", CPU, Inputs()), Peers()))
    assert all(side.status in (Status.MISSING, Status.FAILED) for side in others)


def measure_accuracy(monkeypatch: pytest.MonkeyPatch, **errors_of_fla: tuple[float, float]) -> CaseRecord:
    """Measure beside sides of fla whose o and state are off by these parts of the truth; ours are off by 1%, 2%."""

    def off_by(batch: Batch, o: float, state: float) -> SideMaker:
        def make() -> Side:
            side = ours(batch)
            expected = batch.expected()
            found = {"o": expected["o"] * (1 + o), "state": expected["state"] * (1 + state)}
            return replace(side, outputs=lambda done: found)

        return make

    names = {"fla": "fla", "given": "fla, gates given", "other": "vLLM"}
    monkeypatch.setattr(
        cases, "peers", lambda batch, found: {names[n]: off_by(batch, *e) for n, e in errors_of_fla.items()}
    )
    monkeypatch.setattr(cases, "ours", lambda batch: off_by(batch, 0.01, 0.02)())
    shape = replace(PREFILL, lengths=(1, 70))
    case = AccuracyRow(Row("accuracy", "a row", shape, max_error=0.05))(CPU, Peers())
    return measure_case(case, FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)


@pytest.mark.parametrize(
    ("errors_of_fla", "is_met"),
    [
        ({"fla": (0.011, 0.021)}, [True, True]),
        ({"fla": (0.009, 0.04)}, [False, True]),
        ({"fla": (0.04, 0.019)}, [True, False]),
        ({"fla": (0.04, 0.04), "given": (0.04, 0.019)}, [True, False]),
        ({"fla": (float("nan"), 0.04)}, [None, True]),
        ({"other": (0.001, 0.001)}, [None, None]),
    ],
    ids=["better", "o worse", "state worse", "worse than its best side", "fla is NaN", "no fla"],
)
def test_no_tensor_may_be_further_off_than_flas(
    monkeypatch: pytest.MonkeyPatch, errors_of_fla: dict[str, tuple[float, float]], is_met: list[bool | None]
) -> None:
    record = measure_accuracy(monkeypatch, **errors_of_fla)
    assert [bar.is_met for bar in record.bars] == is_met
    assert all(bar.is_needed for bar in record.bars)
    assert len(record.failures()) == is_met.count(False)


def test_errors_of_both_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = measure_accuracy(monkeypatch, fla=(0.009, 0.04)).bars
    assert [bar.text for bar in bars] == [
        "error of o 1.00e-02 <= fla's 9.00e-03",
        "error of state 2.00e-02 <= fla's 4.00e-02",
    ]
    alone = measure_accuracy(monkeypatch).bars
    assert [bar.text for bar in alone] == ["error of o 1.00e-02 <= fla's", "error of state 2.00e-02 <= fla's"]


@pytest.mark.gpu
def test_suite_runs_end_to_end(tmp_path: Path) -> None:
    arguments = ["gated_delta", "--case", "decode-1", "--case", "verify-64", "--rounds", "3", "--output", str(tmp_path)]
    assert main(arguments) in (0, 1)
    (path,) = tmp_path.glob("*-gated_delta-partial.json")
    for case in RunRecord.from_json(path.read_text(encoding="utf-8")).cases:
        assert case.judged.status is Status.RIGHT, case.judged
        assert case.judged.is_captured
