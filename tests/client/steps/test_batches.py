"""Batches as arrays: the ordinary way makes no object per row, and what is out of the ordinary ends the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.running_sum import HIDDEN, tokens

from deltaline_client import NonFiniteInput, Row, RowOutcome, StepError
from deltaline_client._steps.sequence import RowProgress
from deltaline_server.errors import Reason


def mixed(sequences: Any) -> list[Row]:
    a, b, c, d = sequences
    return [
        Row.prefill(a, tokens(3, seed=1)),
        Row.verify(b, tokens(4, seed=2)),
        Row.decode(c, tokens(1, seed=3)[0]),
        Row.verify(d, tokens(2, seed=4)),
    ]


def wanted(output: str) -> list[NDArray[Any]]:
    parts = [np.cumsum(tokens(count, seed=seed), axis=0) for count, seed in ((3, 1), (4, 2), (1, 3), (2, 4))]
    return [{"all": part, "last": part[-1:], "none": part[:0]}[output] for part in parts]


@pytest.mark.parametrize("output", ["all", "last", "none"])
def test_an_ordinary_step_makes_no_object_per_row(
    driven: Any, server: Any, monkeypatch: pytest.MonkeyPatch, output: Any
) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(4))
    with monkeypatch.context() as patch:
        patch.setattr(RowProgress, "__init__", lambda *_: pytest.fail("an object for an ordinary row"))
        result = do(client.step(mixed(sequences), output=output))
        do(client.commit(sequences[1::2], [2, 0]))
        after = do(client.step([Row.decode(sequence, tokens(1)) for sequence in sequences]))
    for got, expected in zip(result.outputs, wanted(output), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [row.tokens for row in result.rows] == [3, 4, 1, 2]
    assert [row.position for row in result.rows] == [3, 0, 1, 0]
    assert [row.position for row in after.rows] == [sequence.position for sequence in sequences] == [4, 3, 2, 1]
    assert all(row.outcome is RowOutcome.EXECUTED and row.error is None for row in after.rows)
    assert list(server.requests["Step"][-1].accepted) == [-1, 2, -1, 0]
    np.testing.assert_array_equal(after.outputs[1], tokens(4, seed=2)[:2].sum(axis=0, keepdims=True) + tokens(1))
    after.outputs[0][0] = 7  # the caller's own memory
    assert len(server.requests["Step"]) == 2


@pytest.mark.parametrize("output", ["all", "last", "none"])
@pytest.mark.parametrize("fault", ["lost", "full", "a row full", "lost, then a row full"])
def test_a_mixed_step_out_of_the_ordinary_ends_the_same(driven: Any, server: Any, output: Any, fault: str) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(4))
    if fault.startswith("lost"):
        server.lose("Step")
    if fault == "full":
        server.refuse("Step", Reason.QUEUE_FULL, 0.002)
    if fault.endswith("a row full"):
        server.refuse_rows({1: Reason.QUEUE_FULL}, 0.002)
    result = do(client.step(mixed(sequences), output=output))
    for got, expected in zip(result.outputs, wanted(output), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [row.tokens for row in result.rows] == [3, 4, 1, 2]
    do(client.commit(sequences[1::2], [4, 1]))
    assert [sequence.position for sequence in sequences] == [3, 4, 1, 1]
    assert [server.streams[sequence.handle][0].step for sequence in sequences] == [1] * 4


def test_a_refused_verify_of_a_batch_waits_for_no_commit(driven: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(3))
    hidden = np.stack([tokens(2, seed=row) for row in range(3)])
    hidden[1, 1, 0] = np.nan
    with pytest.raises(StepError) as caught:
        do(client.verify(sequences, hidden))
    assert isinstance(caught.value.errors[1], NonFiniteInput)
    assert [sequence.progress().pending_tokens for sequence in sequences] == [2, 0, 2]


@pytest.mark.parametrize("form", ["array", "list"])
def test_verifies_come_as_an_array_or_a_list(driven: Any, server: Any, form: str) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(3))
    drafts = np.stack([tokens(4, seed=row) for row in range(3)])
    hidden: Any = list(drafts) if form == "list" else drafts
    outputs = do(client.verify(sequences, hidden))
    assert [output.shape for output in outputs] == [(4, HIDDEN)] * 3
    np.testing.assert_array_equal(np.stack(outputs), np.cumsum(drafts, axis=1))
    do(client.commit(sequences, [0, 4, 2]))
    assert [sequence.position for sequence in sequences] == [0, 4, 2]
    assert list(server.requests["Step"][-1].query_start_loc) == [0, 4, 8, 12]


def test_wrong_arrays_of_drafts_are_named(driven: Any, server: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(2))
    for shape, message in (
        ((2, 5, HIDDEN), "1 .. 4 tokens"),
        ((2, 0, HIDDEN), "1 .. 4 tokens"),
        ((2, 3, HIDDEN + 1), f"width {HIDDEN}"),
        ((3, HIDDEN), rf"2 rows, one per sequence, \[2, n, {HIDDEN}\], got shape \(3, {HIDDEN}\)"),
        ((2, 1, 3, HIDDEN), "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            do(client.verify(sequences, np.zeros(shape)))
    assert not server.requests["Step"]


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (Row.decode, (2, HIDDEN), "one token in a decode row"),
        (Row.decode, (1, 1, HIDDEN), "at least one token"),
        (Row.decode, (HIDDEN + 1,), f"width {HIDDEN}"),
        (Row.prefill, (HIDDEN,), "at least one token"),
        (Row.prefill, (0, HIDDEN), "at least one token"),
        (Row.verify, (5, HIDDEN), "at most 4 tokens"),
        (Row.verify, (2, HIDDEN - 1), f"width {HIDDEN}"),
    ],
)
def test_a_wrong_row_is_named(
    driven: Any, server: Any, make: Callable[..., Row], shape: Any, message: str, others: int
) -> None:
    client, do = driven.client, driven.do
    wrong, *sequences = do(client.open_many(1 + others))
    rows = [Row.decode(sequence, tokens(1)) for sequence in sequences]
    with pytest.raises(ValueError, match=rf"rows\[{others}\].*{message}"):
        do(client.step([*rows, make(wrong, np.zeros(shape, np.float32))]))
    assert not server.requests["Step"]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, None])
def test_rows_of_any_numbers_are_taken(driven: Any, dtype: Any) -> None:
    client, do = driven.client, driven.do
    sequences = do(client.open_many(3))
    hidden: list[Any] = [tokens(1), tokens(1, seed=1)[0], tokens(1, seed=2)[:, ::-1]]
    first: Any = hidden[0].tolist() if dtype is None else hidden[0].astype(dtype)
    rows = [Row.decode(sequence, row) for sequence, row in zip(sequences, [first, *hidden[1:]], strict=True)]
    for output, row in zip(do(client.step(rows)).outputs, hidden, strict=True):
        np.testing.assert_array_equal(output, row.reshape(1, HIDDEN))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "requires_grad", "one token each", "a tuple"])
def test_decodes_take_lists_of_tensors(driven: Any, kind: str) -> None:
    torch = pytest.importorskip("torch")
    client, do = driven.client, driven.do
    hidden: Any = list(torch.from_numpy(tokens(2)))
    if kind in ("float32", "bfloat16"):
        hidden = [row.to(getattr(torch, kind)) for row in hidden]
    elif kind == "requires_grad":
        hidden = [row.requires_grad_() for row in hidden]
    else:
        hidden = tuple(hidden) if kind == "a tuple" else [row[None] for row in hidden]
    np.testing.assert_array_equal(do(client.decode(do(client.open_many(2)), hidden)), tokens(2))


def test_what_is_no_array_of_numbers_is_named(driven: Any, server: Any) -> None:
    torch = pytest.importorskip("torch")
    client, do = driven.client, driven.do
    pair = do(client.open_many(2))
    float8, ragged = torch.zeros(2, HIDDEN).to(torch.float8_e4m3fn), [[1.0] * HIDDEN, [1.0]]
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: client.decode(pair, float8),
            r"^hidden: expected a dense tensor of .* got one of torch\.float8_e4m3fn",
        ),
        (lambda: client.verify(pair, list(float8)), r"^rows\[0\]: expected a dense .* got one of torch\.float8_e4m3fn"),
        (lambda: client.decode(pair, torch.zeros(2, HIDDEN).to_sparse()), r"^hidden: expected a dense tensor"),
        (lambda: pair[0].prefill(ragged), r"^hidden: expected an array of numbers, got a list"),
        (lambda: pair[0].prefill([torch.zeros(HIDDEN, requires_grad=True)]), r"^hidden: expected an array of num"),
        (lambda: client.prefill(pair, None), "^hidden: expected 2 rows, one per sequence, got None"),
        (lambda: client.decode(pair, np.float32(1)), r"^hidden: expected 2 rows, one per sequence, got "),
    ]
    for call, message in cases:
        with pytest.raises(TypeError, match=message):
            do(call())
    assert not server.requests["Step"]


def test_a_step_of_no_rows_is_nothing(driven: Any, server: Any) -> None:
    result = driven.do(driven.client.step([]))
    assert result.rows == () and not server.requests["Step"]
