"""The Mamba2 recurrence's cases on small shapes: work counted by hand, our sides agree with the bench's own truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench.fakes import FakeTimer

from deltaline_bench.bar import Kind
from deltaline_bench.case import CaseMaker
from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.mamba2.cases import DECODE, ROWS, SUITE, VERIFY, Row, VerifyRow
from deltaline_bench.mamba2.field import peers
from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.mamba2.sides import ours
from deltaline_bench.mamba2.truth import Tokens, advance
from deltaline_bench.measurement import measure_case
from deltaline_bench.peers import Peers
from deltaline_bench.record import Status

CPU = torch.device("cpu")
PREFILL = Shape(Mode.PREFILL, (3, 70, 1, 64, 130, 0), 2, 4, 16, 24, torch.float32)
DECODE_SHAPE = Shape(Mode.DECODE, (1,) * 5, 2, 4, 16, 24, torch.float32)
VERIFY_SHAPE = Shape(Mode.VERIFY, (3,) * 6, 2, 4, 16, 24, torch.float32)
SMALL: list[tuple[str, CaseMaker]] = [
    ("prefill", Row("prefill", "rows around the chunk", PREFILL, max_error=1e-5)),
    ("decode", Row("decode", "one token", DECODE_SHAPE, max_error=1e-5)),
    ("decode bf16", Row("decode bf16", "bf16 state", replace(DECODE_SHAPE, state=torch.bfloat16))),
    ("verify", VerifyRow(Row("verify", "three tokens", VERIFY_SHAPE, max_error=1e-5))),
]


@pytest.mark.parametrize("maker", [maker for _, maker in SMALL], ids=[name for name, _ in SMALL])
def test_our_side_agrees_with_the_truth_of_the_bench(maker: CaseMaker) -> None:
    record = measure_case(maker(CPU, Peers()), FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    assert record.judged.status is Status.RIGHT, record.judged
    beside = [side for side in record.sides if side.name == DECODE]
    assert all(side.status is Status.RIGHT for side in beside), beside
    assert bool(beside) == isinstance(maker, VerifyRow)


def test_truth_agrees_with_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    tokens = Tokens(draw(2, 70, 2, 8), draw(2, 70, 2, 8), draw(2, 70, 6, 5), draw(2, 70, 6, 5), -draw(2, 70, 6).exp())
    first = draw(2, 6, 5, 8)
    y, after = advance(tokens, first)
    for row in range(2):
        for head in range(6):
            h = first[row, head]
            for t in range(70):
                h = tokens.g[row, t, head].exp() * h + torch.outer(tokens.u[row, t, head], tokens.B[row, t, head // 3])
                want = h @ tokens.C[row, t, head // 3] + tokens.skip[row, t, head]
                torch.testing.assert_close(y[row, t, head], want, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(after[row, head], h, rtol=1e-9, atol=1e-11)


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    # A decode of one row: x, B, C, dt, y of 2 bytes; the state of 4 bytes in and out; A_log, D, dt_bias.
    shape = Shape(Mode.DECODE, (1,))
    state = 128 * 64 * 128
    assert shape.num_bytes() == 2 * (8192 + 2 * 1024 + 128 + 8192) + 2 * 4 * state + 3 * 128 * 4
    assert shape.num_flops() == 5 * state
    verify = Shape(Mode.VERIFY, (5,))
    record = 1024 + 8192 + 128
    assert verify.num_bytes(3) - verify.num_bytes() == 3 * record * 4
    assert verify.num_flops(3) == (25 + 9) * state
    prefill = Shape(Mode.PREFILL, (64,))
    assert prefill.num_flops() == 64 * (8 * 2 * 64 * 128 + 128 * (4 * 64 * 128 + 2 * 64 * 64))


def test_every_case_has_the_bars_of_its_figures() -> None:
    assert set(SUITE.cases) == {*(row.name for row in ROWS), VERIFY.row.name}
    bars = {row.name: [bar.value for bar in row.needed] for row in ROWS}
    assert bars["decode-64"] == [148] and bars["decode-256"] == [570] and bars["decode-1024"] == [2260]
    assert bars["decode-256-bf16-state"] == [310] and bars["prefill-8x2048"] == [450]
    assert [bar.kind for bar in VERIFY.row.needed] == [Kind.PEERS]
    assert VERIFY.row.needed[0].value >= 1 / 1.4


def test_lines_that_no_row_may_read_are_poisoned() -> None:
    batch = Batch(VERIFY_SHAPE, "poison", CPU)
    spare = torch.ones(batch.num_lines, dtype=torch.bool)
    spare[batch.line_index] = False
    assert spare.sum() == batch.num_lines - 6
    assert batch.new_state()[spare].isnan().all() and batch.new_drafts()[spare].isnan().all()
    side = ours(batch)
    side.call()
    assert not any(x.isnan().any() for x in side.outputs(side.call()).values())


def test_the_field_is_asked_for_what_it_offers() -> None:
    assert set(peers(Batch(DECODE_SHAPE, "field", CPU), Peers())) == {"vLLM", "SGLang"}
    assert set(peers(Batch(VERIFY_SHAPE, "field", CPU), Peers())) == {"vLLM"}
    record = measure_case(SMALL[1][1](CPU, Peers()), FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    assert {side.status for side in record.sides if not side.is_ours} <= {Status.MISSING, Status.RIGHT}
