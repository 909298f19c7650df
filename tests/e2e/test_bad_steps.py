"""Steps and commits that do not fit their sequence: each gets its status, and the sequence stays as it was."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, status_pb2
from rigs.target import HIDDEN, LAYER, Target, reason_of, step_request

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

P, D, V = pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_VERIFY
NONE = -1  # no commit
# Rows are (kind, step, position, accepted, tokens). What a sequence went through before the row or commit in question;
# its last step is the one that may be replayed.
HISTORIES: dict[str, list[tuple[int, int, int, int, int]]] = {
    "fresh": [],
    "decoded": [(P, 1, 0, NONE, 2), (D, 2, 2, NONE, 1)],  # step 2, position 3
    "drafted": [(P, 1, 0, NONE, 2), (V, 2, 2, NONE, 3)],  # step 2, position 2, 3 tokens pending
    "committed": [(P, 1, 0, NONE, 2), (V, 2, 2, NONE, 3)],  # step 2, position 4, after a commit of 2
}
# A step that each history allows.
NEXT = {
    "fresh": (D, 1, 0, NONE, 1),
    "decoded": (D, 3, 3, NONE, 1),
    "drafted": (D, 3, 4, 2, 1),
    "committed": (D, 3, 4, NONE, 1),
}


def verdict(status: status_pb2.Status) -> str:
    """Code and reason of a status."""
    return f"{code_pb2.Code.Name(status.code)} {reason_of(status)}"


async def step(target: Target, handle: int, row: tuple[int, int, int, int, int]) -> tuple[str, bytes]:
    """Take one step with raw values; its outcome or its status, and its output."""
    kind, number, position, accepted, tokens = row
    hidden = np.random.default_rng(number % 1000 + tokens).standard_normal((tokens, HIDDEN)).astype(np.float32)
    request = step_request(
        target,
        [handle],
        kind=[kind],
        step=[number],
        position=[position],
        accepted=[accepted],
        query_start_loc=[0, tokens],
        hidden=wire.encode(hidden),
    )
    code, _, body, status = await target.send(LAYER + "Step", request.SerializeToString())
    if code is not grpc.StatusCode.OK:
        return f"RPC {verdict(status)}", b""
    reply = pb.StepResponse.FromString(body)
    for refused in reply.row_status:
        assert reply.outcome == [pb.ROW_OUTCOME_REFUSED] and not reply.hidden.inline
        return verdict(refused.status), b""
    return pb.RowOutcome.Name(reply.outcome[0]).removeprefix("ROW_OUTCOME_"), reply.hidden.inline


async def commit(target: Target, handle: int, number: int, accepted: int) -> str:
    """Commit with raw values; OK or the row's status."""
    request = pb.CommitSequencesRequest(
        server_epoch=target.epoch, sequence=[handle], step=[number], accepted=[accepted]
    )
    code, _, body, _ = await target.send(LAYER + "CommitSequences", request.SerializeToString())
    assert code is grpc.StatusCode.OK
    refused = pb.CommitSequencesResponse.FromString(body).row_status
    return verdict(refused[0].status) if refused else "OK"


async def live(target: Target, history: str) -> tuple[int, bytes]:
    """Put a new sequence through a history; its handle and its last output."""
    (sequence,) = await target.client.open_many(1)
    output = b""
    for row in HISTORIES[history]:
        outcome, output = await step(target, sequence.handle, row)
        assert outcome == "EXECUTED"
    if history == "committed":
        assert await commit(target, sequence.handle, 2, 2) == "OK"
    return sequence.handle, output


def progress_of(target: Target, handle: int) -> Any:
    table = target.server.runtime.table
    return table.describe(table.server_epoch, np.array([handle], dtype=np.uint64))[0].spans


async def check_unchanged(target: Target, history: str, handle: int) -> None:
    """The next allowed step gives the bits that it gives a sequence to which nothing but the history happened."""
    undisturbed, _ = await live(target, history)
    outcome, output = await step(target, handle, NEXT[history])
    assert (outcome, output) == await step(target, undisturbed, NEXT[history])
    assert outcome == "EXECUTED"
    target.close_strays()
    await target.check_unharmed()


@pytest.mark.parametrize(
    ("history", "row", "expected"),
    [
        # The number of the step.
        ("fresh", (P, 2**64 - 1, 0, NONE, 2), "OUT_OF_RANGE STEP_GAP"),
        ("decoded", (D, 4, 3, NONE, 1), "OUT_OF_RANGE STEP_GAP"),
        ("decoded", (D, 0, 3, NONE, 1), "FAILED_PRECONDITION STEP_STALE"),
        ("decoded", (D, 2**63 + 3, 3, NONE, 1), "OUT_OF_RANGE STEP_GAP"),
        ("decoded", (P, 2, 2, NONE, 1), "ABORTED STEP_CONFLICT"),
        ("drafted", (V, 2, 2, NONE, 2), "ABORTED STEP_CONFLICT"),
        # The position.
        ("decoded", (D, 3, 4, NONE, 1), "FAILED_PRECONDITION POSITION_MISMATCH"),
        ("decoded", (D, 3, 2**64 - 1, NONE, 1), "FAILED_PRECONDITION POSITION_MISMATCH"),
        ("drafted", (D, 3, 2, 2, 1), "FAILED_PRECONDITION POSITION_MISMATCH"),
        # The accepted count.
        ("decoded", (D, 3, 3, 0, 1), "FAILED_PRECONDITION NOTHING_TO_COMMIT"),
        ("drafted", (D, 3, 6, 4, 1), "INVALID_ARGUMENT ACCEPTED_OUT_OF_RANGE"),
        ("drafted", (D, 3, 2, -(2**31), 1), "INVALID_ARGUMENT ACCEPTED_OUT_OF_RANGE"),
        ("drafted", (D, 3, 2 + 2**31 - 1, 2**31 - 1, 1), "INVALID_ARGUMENT ACCEPTED_OUT_OF_RANGE"),
        ("drafted", (P, 3, 2, NONE, 2), "FAILED_PRECONDITION VERIFY_PENDING"),
        ("committed", (D, 3, 4, 1, 1), "ABORTED COMMIT_CONFLICT"),
        # The kind.
        ("drafted", (V, 3, 4, 2, 5), "RPC INVALID_ARGUMENT INVALID_BATCH"),
    ],
    ids=str,
)
async def test_steps_that_do_not_fit_change_nothing(
    target: Target, history: str, row: tuple[int, int, int, int, int], expected: str
) -> None:
    handle, _ = await live(target, history)
    before = progress_of(target, handle)
    assert await step(target, handle, row) == (expected, b"")
    assert progress_of(target, handle) == before
    await check_unchanged(target, history, handle)


@pytest.mark.parametrize(
    ("history", "row"),
    [
        ("fresh", (D, 1, 0, NONE, 1)),
        ("fresh", (V, 1, 0, NONE, 4)),
        ("drafted", (D, 3, 2, 0, 1)),
        ("drafted", (V, 3, 5, 3, 4)),
        ("committed", (D, 3, 4, 2, 1)),
    ],
    ids=str,
)
async def test_steps_that_only_look_odd_are_taken(
    target: Target, history: str, row: tuple[int, int, int, int, int]
) -> None:
    handle, _ = await live(target, history)
    assert (await step(target, handle, row))[0] == "EXECUTED"
    target.close_strays()
    await target.check_unharmed()


@pytest.mark.parametrize("history", ["decoded", "drafted", "committed"])
async def test_a_step_again_gives_the_same_bytes(target: Target, history: str) -> None:
    handle, output = await live(target, history)
    before = progress_of(target, handle)
    for _ in range(2):
        assert await step(target, handle, HISTORIES[history][-1]) == ("REPLAYED", output)
    assert output and progress_of(target, handle) == before
    await check_unchanged(target, history, handle)


@pytest.mark.parametrize(
    ("history", "number", "accepted", "expected"),
    [
        ("fresh", 2**64 - 1, 0, "FAILED_PRECONDITION NOTHING_TO_COMMIT"),
        ("drafted", 3, 2, "FAILED_PRECONDITION NOTHING_TO_COMMIT"),
        ("drafted", 2, 4, "INVALID_ARGUMENT ACCEPTED_OUT_OF_RANGE"),
        ("drafted", 2, -(2**31), "INVALID_ARGUMENT ACCEPTED_OUT_OF_RANGE"),
        ("committed", 2, 3, "ABORTED COMMIT_CONFLICT"),
        ("committed", 2, 2, "OK"),
    ],
)
async def test_commits_that_do_not_fit_change_nothing(
    target: Target, history: str, number: int, accepted: int, expected: str
) -> None:
    handle, _ = await live(target, history)
    before = progress_of(target, handle)
    assert await commit(target, handle, number, accepted) == expected
    assert progress_of(target, handle) == before
    await check_unchanged(target, history, handle)
