"""Replies written from arrays are what protobuf would have written of the same values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import prefix_pb2 as prefix_pb
from deltaline_server.errors import Reason, Refusal
from deltaline_server.front import replies
from deltaline_server.step import StepResult, StepTiming
from deltaline_server.tables.prefixes.cost import ReusePolicy, StoredPrefix, Tier
from deltaline_server.tables.prefixes.index import Miss
from deltaline_server.tables.prefixes.match import Match


def make_result(num_rows: int, **fields: Any) -> StepResult:
    """A result in which every second row was refused."""
    outcome = np.array([1 + 3 * (row % 2) for row in range(num_rows)], np.uint8)
    starts = np.concatenate(([0], np.cumsum(outcome == 1)))
    values: dict[str, Any] = {
        "outcome": outcome,
        "position": np.arange(num_rows) + 2**40,
        "output_start_loc": starts,
        "hidden": np.random.default_rng(1).standard_normal((int(starts[-1]), 6)).astype(ml_dtypes.bfloat16),
        "refusals": {
            row: Refusal(Reason.STEP_GAP, "the next step is 4", {"step": "3"}) for row in range(1, num_rows, 2)
        },
        "timing": StepTiming(1e-3, 2e-6, 0.0, 5.0, num_rows, num_rows),
    }
    return StepResult(**(values | fields))


def by_protobuf(result: StepResult) -> pb.StepResponse:
    """The same message, field by field."""
    message = pb.StepResponse(
        outcome=result.outcome.tolist(),
        position=result.position.tolist(),
        output_start_loc=result.output_start_loc.tolist(),
        hidden=wire.encode(result.hidden),
        row_status=replies.row_statuses(result.refusals),
    )
    timing = result.timing
    if timing is not None:
        message.timing.queue_ns, message.timing.copy_in_ns = 1_000_000, 2000
        message.timing.copy_out_ns = 5_000_000_000
        message.timing.batch_rows = message.timing.batch_tokens = len(result.outcome)
    return message


RESULTS = {
    "one row": make_result(1),
    "200 rows": make_result(200),
    "no timing": make_result(3, timing=None),
    "no outputs": make_result(
        2, output_start_loc=np.zeros(3, np.int64), hidden=np.zeros((0, 6), np.float32), refusals={}
    ),
    "strided outputs": make_result(3, hidden=np.arange(24, dtype=np.float32).reshape(2, 12)[:, ::2]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_step_response_is_the_message(name: str) -> None:
    body, expected = replies.JOIN(replies.step_response(RESULTS[name])), by_protobuf(RESULTS[name])
    assert pb.StepResponse.FromString(body) == expected
    # Written once: parsing and writing it anew gives no shorter message.
    assert len(body) == len(expected.SerializeToString())
    in_stream = pb.StepStreamResponse.FromString(replies.JOIN(replies.stream_response(2**63, RESULTS[name])))
    assert in_stream == pb.StepStreamResponse(correlation_id=2**63, step=expected)


def test_a_reply_that_waits_copies_no_outputs() -> None:
    result = make_result(3)
    pieces = [np.frombuffer(piece, np.uint8) for piece in replies.stream_response(1, result)]
    assert sum(np.shares_memory(piece, result.hidden) for piece in pieces) == 1


def test_what_was_found_of_a_prompt_in_microseconds() -> None:
    stored = StoredPrefix(64, bytes(16), Tier.HOST, 1000)
    message = replies.prefix_match(Match(stored, 0.25, 1.5, None, 128))
    where: dict[str, Any] = {
        "snapshot_id": bytes(16),
        "position": 64,
        "tier": prefix_pb.TIER_HOST,
        "shared_position": 128,
    }
    times: dict[str, Any] = {"restore_us": 250_000, "compute_us": 1_500_000}
    assert message == prefix_pb.PrefixMatch(**where, **times)
    assert replies.prefix_match(Match(stored, 0.0, 1e-9, None, 0)).compute_us == 1, "0 is for what is not known"
    miss = replies.prefix_match(Match(None, 0.0, None, Miss.OTHER_ADAPTER, 0))
    assert miss == prefix_pb.PrefixMatch(miss=prefix_pb.PREFIX_MISS_OTHER_ADAPTER)


def test_the_enums_have_the_wire_s_numbers() -> None:
    for ours, wires, beginning in (
        (Tier, prefix_pb.Tier, "TIER_"),
        (Miss, prefix_pb.PrefixMiss, "PREFIX_MISS_"),
        (ReusePolicy, prefix_pb.ReusePolicy, "REUSE_POLICY_"),
    ):
        names = {name.removeprefix(beginning): number for name, number in wires.items() if number}
        assert {one.name: one.value for one in ours} == names
