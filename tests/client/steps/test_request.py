"""A request as arrays: what it sends, and which replies fit it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client import Client, ProtocolError
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.hold import Group, Hold
from deltaline_client._steps.request import Request
from deltaline_client._steps.sequence import Progress, SequenceRecord
from deltaline_client._steps.sequences import begin
from deltaline_client._table import Column
from deltaline_client._transport.flow import Server
from deltaline_client._transport.messages import StepAnswer

HIDDEN = 4
EXECUTED, REFUSED = layers.ROW_OUTCOME_EXECUTED, layers.ROW_OUTCOME_REFUSED


def made() -> tuple[Request, list[Progress]]:
    """A verify of two tokens of three sequences, the second of which carries a commit; and their progress."""
    client = Client("unix:/nowhere")
    sequences = begin(client, SequenceRecord, Server(7, ""), [1, 2, 3], 0, None, b"")
    hidden = np.arange(6 * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN)
    batch = Batch.uniform(sequences, layers.ROW_KIND_VERIFY, hidden, 2, (HIDDEN,))
    progress = [sequence.progress() for sequence in sequences]
    progress[1].write({Column.STEP: 4, Column.POSITION: 9, Column.PENDING: 3, Column.COMMIT: 1 + 2})
    progress[2].write({Column.STEP: 1, Column.POSITION: 5})
    with Hold(Group.of(client, sequences), 0) as hold:
        return Request.of_batch(batch, hold), progress


def answer(outcome: list[Any], start: list[int], refused: tuple[int, ...] = (), rows: int | None = None) -> StepAnswer:
    fields = layers.StepResponse()
    for row in refused:
        fields.row_status.add(row=row)
    hidden = np.zeros((start[-1] if rows is None else rows, HIDDEN), np.float32)
    position = np.zeros(len(outcome), np.int64)
    return StepAnswer(bytes(outcome), position, np.array(start, "<u4").tobytes(), fields, hidden)


def test_the_message_holds_the_next_steps() -> None:
    body = b"".join(made()[0].message({"span": 1, "priority": 3, "queue_timeout_s": 0.5}, 1 << 20))
    message = layers.StepRequest.FromString(body)
    assert (message.server_epoch, message.span, message.priority, message.queue_timeout_us) == (7, 1, 3, 500_000)
    assert message.max_reply_bytes == 1 << 20
    assert list(message.sequence) == [1, 2, 3] and list(message.query_start_loc) == [0, 2, 4, 6]
    assert list(message.step) == [1, 5, 2]
    assert list(message.position) == [0, 11, 5]
    assert list(message.accepted) == [-1, 2, -1]


def test_a_reply_gives_each_applied_row_its_outputs() -> None:
    assert made()[0].read(answer([EXECUTED] * 3, [0, 2, 4, 6])).shape == (6, HIDDEN)
    assert made()[0].read(answer([EXECUTED, REFUSED, EXECUTED], [0, 2, 2, 4], (1,))).shape == (4, HIDDEN)
    assert made()[0].read(answer([REFUSED] * 3, [0, 0, 0, 0], (0, 1, 2))).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (answer([EXECUTED] * 2, [0, 2, 4]), "arrays"),
        (answer([EXECUTED] * 3, [0, 1, 4, 6]), "arrays"),
        (answer([EXECUTED] * 3, [0, 2, 4, 5]), "arrays"),
        (answer([EXECUTED, REFUSED, EXECUTED], [0, 2, 4, 6], (1,)), "arrays"),
        (answer([EXECUTED, REFUSED, EXECUTED], [0, 2, 2, 4]), "statuses"),
        (answer([EXECUTED] * 3, [0, 2, 4, 6], (1,)), "statuses"),
        (answer([EXECUTED, 99, EXECUTED], [0, 2, 4, 6]), "statuses"),
        (answer([EXECUTED] * 3, [0, 2, 4, 6], rows=5), "tensor"),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(wrong: StepAnswer, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        made()[0].read(wrong)


def test_only_a_batch_that_was_applied_whole_advances_as_arrays() -> None:
    request, _ = made()
    assert not request.advance(answer([EXECUTED, REFUSED, EXECUTED], [0, 2, 2, 4], (1,)))
    steps = [step for _, step in request.rows()]
    assert [(step.number, step.position, step.accepted, step.in_doubt) for step in steps] == [
        (1, 0, -1, True),
        (5, 11, 2, True),
        (2, 5, -1, True),
    ]
    assert not request.advance(answer([EXECUTED] * 3, [0, 2, 4, 6]))  # its rows go on one by one
    whole, progress = made()
    assert whole.advance(answer([EXECUTED] * 3, [0, 2, 4, 6]))
    assert [(one.step, one.pending_tokens, one.accepted) for one in progress] == [
        (1, 2, None),
        (5, 2, None),
        (2, 2, None),
    ]
