"""Every fault of a whole request is refused with its reason and field; what is right becomes arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rigs.limits import make_limits

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front import requests
from deltaline_server.front.requests import MAX_COUNTER, Served
from deltaline_server.front.steps.step_message import from_protobuf
from deltaline_server.memory.regions import Regions
from deltaline_server.step import OutputRows, SpanShapes

HIDDEN = 8
LIMITS = make_limits(max_sequences=4, max_draft_tokens=3)
SERVED = Served(
    LIMITS,
    [SpanShapes(HIDDEN, 4)] * 2,
    np.dtype(np.float32),
    Regions(limit_bytes=0, default_lease_s=1.0, max_lease_s=1.0, clock=time.monotonic),
)


def served_with(**changes: int) -> Served:
    return replace(SERVED, limits=replace(LIMITS, **changes))


def hidden(tokens: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(tokens * HIDDEN).reshape(tokens, HIDDEN).astype(dtype)


def make_step() -> pb.StepRequest:
    """A sound step: a prefill of 4 tokens, a decode and a verify of 3."""
    return pb.StepRequest(
        server_epoch=5,
        span=1,
        sequence=[11, 12, 13],
        kind=[pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_VERIFY],
        step=[1, 2, 3],
        position=[0, 7, 9],
        accepted=[-1, -1, 2],
        query_start_loc=[0, 4, 5, 8],
        hidden=wire.encode(hidden(8)),
        priority=-8,
    )


def read(message: pb.StepRequest, served: Served = SERVED, **times: Any) -> Any:
    return requests.read_step(from_protobuf(message), served, **({"now_s": 100.0, "until_s": None} | times))


def test_sound_step_becomes_arrays() -> None:
    step = read(make_step())
    assert (step.form.server_epoch, step.form.span, step.form.priority, step.deadline_s) == (5, 1, -8, None)
    assert [step.form.handle.tolist(), step.form.kind.tolist(), step.form.accepted.tolist()] == [
        [11, 12, 13],
        [1, 2, 3],
        [-1, -1, 2],
    ]
    assert (step.form.handle.dtype, step.form.kind.dtype, step.step.dtype) == (np.uint64, np.uint8, np.int64)
    np.testing.assert_array_equal(step.hidden, hidden(8))
    assert step.form.output is OutputRows.ALL
    message = make_step()
    message.ClearField("accepted")
    assert read(message).form.accepted.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("value", [2**62, 2**63 - 1, 2**63, 2**64 - 1], ids=["2^62", "2^63-1", "2^63", "2^64-1"])
@pytest.mark.parametrize("field", ["step", "position"])
def test_counters_beyond_int64_are_cut(field: str, value: int) -> None:
    message = make_step()
    getattr(message, field)[0] = value
    assert getattr(read(message), field)[0] == MAX_COUNTER


@pytest.mark.parametrize(
    ("timeout_us", "until_s", "deadline_s"),
    [(0, None, None), (0, 102.0, 102.0), (500_000, None, 100.5), (500_000, 102.0, 100.5), (3_000_000, 102.0, 102.0)],
)
def test_earlier_deadline_counts(timeout_us: int, until_s: float | None, deadline_s: float | None) -> None:
    message = make_step()
    message.queue_timeout_us = timeout_us
    assert read(message, until_s=until_s).deadline_s == deadline_s


def set_field(**values: Any) -> Callable[[pb.StepRequest], None]:
    """A change that sets fields, repeated ones too."""

    def change(message: pb.StepRequest) -> None:
        for name, value in values.items():
            message.ClearField(name)  # type: ignore[arg-type]
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)

    return change


def set_hidden(array: np.ndarray[Any, Any]) -> Callable[[pb.StepRequest], None]:
    return lambda message: message.hidden.CopyFrom(wire.encode(array))


def set_bytes(shape: list[int], num_bytes: int) -> Callable[[pb.StepRequest], None]:
    def change(message: pb.StepRequest) -> None:
        message.hidden.ClearField("shape")
        message.hidden.shape.extend(shape)
        message.hidden.inline = bytes(num_bytes)

    return change


FAULTS: dict[str, tuple[Callable[[pb.StepRequest], None], Reason, str]] = {
    "epoch 0": (set_field(server_epoch=0), Reason.INVALID_REQUEST, "server_epoch"),
    "unknown span": (set_field(span=2), Reason.UNKNOWN_SPAN, "span"),
    "largest span": (set_field(span=2**32 - 1), Reason.UNKNOWN_SPAN, "span"),
    "no rows": (set_field(sequence=[]), Reason.INVALID_BATCH, "sequence"),
    "too many rows": (set_field(sequence=[1, 2, 3, 4, 5]), Reason.INVALID_BATCH, "sequence"),
    "a sequence twice": (set_field(sequence=[11, 12, 11]), Reason.DUPLICATE_SEQUENCE, "sequence"),
    "kinds missing": (set_field(kind=[1, 2]), Reason.INVALID_BATCH, "kind"),
    "kind unspecified": (set_field(kind=[1, 2, 0]), Reason.INVALID_BATCH, "kind"),
    "kind unknown": (set_field(kind=[1, 2, 4]), Reason.INVALID_BATCH, "kind"),
    "kind negative": (set_field(kind=[1, 2, -1]), Reason.INVALID_BATCH, "kind"),
    "kind that is 1 modulo 256": (set_field(kind=[257, 2, 3]), Reason.INVALID_BATCH, "kind"),
    "steps missing": (set_field(step=[1, 2]), Reason.INVALID_BATCH, "step"),
    "positions surplus": (set_field(position=[0] * 4), Reason.INVALID_BATCH, "position"),
    "accepted missing": (set_field(accepted=[1]), Reason.INVALID_BATCH, "accepted"),
    "offsets missing": (set_field(query_start_loc=[0, 4, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "offsets empty": (set_field(query_start_loc=[]), Reason.INVALID_BATCH, "query_start_loc"),
    "offsets start late": (set_field(query_start_loc=[1, 4, 5, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "offsets end early": (set_field(query_start_loc=[0, 4, 5, 7]), Reason.INVALID_BATCH, "query_start_loc"),
    "offsets end late": (set_field(query_start_loc=[0, 4, 5, 9]), Reason.INVALID_BATCH, "query_start_loc"),
    "offsets fall": (set_field(query_start_loc=[0, 5, 4, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "offsets stand still": (set_field(query_start_loc=[0, 5, 5, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "offset above 2^31": (set_field(query_start_loc=[0, 4, 2**32 - 1, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "decode of 2 tokens": (set_field(query_start_loc=[0, 4, 6, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "verify too long": (set_field(query_start_loc=[0, 3, 4, 8]), Reason.INVALID_BATCH, "query_start_loc"),
    "output unknown": (set_field(output=4), Reason.INVALID_REQUEST, "output"),
    "output negative": (set_field(output=-1), Reason.INVALID_REQUEST, "output"),
    "priority too high": (set_field(priority=8), Reason.INVALID_REQUEST, "priority"),
    "priority too low": (set_field(priority=-9), Reason.INVALID_REQUEST, "priority"),
    "no tensor": (lambda message: message.ClearField("hidden"), Reason.INVALID_TENSOR, "hidden.dtype"),
    "other dtype": (set_hidden(hidden(8, ml_dtypes.bfloat16)), Reason.INVALID_TENSOR, "hidden.dtype"),
    "other width": (set_hidden(np.zeros((8, HIDDEN + 1), np.float32)), Reason.INVALID_TENSOR, "hidden.shape"),
    "rank 1": (set_hidden(np.zeros(8 * HIDDEN, np.float32)), Reason.INVALID_TENSOR, "hidden.shape"),
    "rank 3": (set_hidden(np.zeros((8, 1, HIDDEN), np.float32)), Reason.INVALID_TENSOR, "hidden.shape"),
    "bytes missing": (set_bytes([8, HIDDEN], 8 * HIDDEN * 4 - 4), Reason.INVALID_TENSOR, "hidden.inline"),
    "above the limit": (set_bytes([64, HIDDEN], 64 * HIDDEN * 4), Reason.MESSAGE_TOO_LARGE, "hidden.inline"),
    "claims 4 TiB": (set_bytes([2**20, 2**20], 16), Reason.MESSAGE_TOO_LARGE, "hidden.inline"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_step_is_refused(name: str) -> None:
    change, reason, field = FAULTS[name]
    message = make_step()
    change(message)
    with pytest.raises(RequestError) as caught:
        read(message)
    assert (caught.value.refusal.reason, caught.value.refusal.field) == (reason, field)
    assert reason is not Reason.DUPLICATE_SEQUENCE or "11" not in caught.value.refusal.message


def test_what_the_queue_could_never_take_is_refused_for_good() -> None:
    small = served_with(queue_bytes=8 * HIDDEN * 4 - 1)
    with pytest.raises(RequestError, match="has 256 bytes, expected at most 255") as caught:
        read(make_step(), small)
    assert (caught.value.refusal.reason, caught.value.refusal.retry_after_s) == (Reason.MESSAGE_TOO_LARGE, None)
    read(make_step(), served_with(queue_bytes=8 * HIDDEN * 4, queue_rows=3))
    with pytest.raises(RequestError, match="at most 2 entries, all that may wait here, got 3") as caught:
        read(make_step(), served_with(queue_rows=2))
    assert (caught.value.refusal.reason, caught.value.refusal.retry_after_s) == (Reason.INVALID_BATCH, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("count", 0), ("count", 5), ("count", 2**32 - 1), *(("open_token", bytes(n)) for n in (1, 15, 17))],
    ids=lambda value: value if isinstance(value, str) else repr(value)[-12:],
)
def test_a_wrong_open_is_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        requests.read_count(pb.OpenSequencesRequest(**({"count": 1} | {field: value})), SERVED)


def test_lease_is_in_seconds_and_limited() -> None:
    assert requests.read_lease_s(0, SERVED) is None
    assert requests.read_lease_s(1000, SERVED) == 1.0
    with pytest.raises(RequestError, match="lease_ms"):
        requests.read_lease_s(1001, SERVED)


def test_commit_needs_a_step_and_a_count_per_sequence() -> None:
    message = pb.CommitSequencesRequest(server_epoch=5, sequence=[1, 2], step=[3, 2**64 - 1], accepted=[0, -7])
    commit = requests.read_commit(message, SERVED)
    assert (commit.step.tolist(), commit.accepted.tolist()) == ([3, MAX_COUNTER], [0, -7])
    for field in ("step", "accepted"):
        short = pb.CommitSequencesRequest.FromString(message.SerializeToString())
        getattr(short, field).pop()
        with pytest.raises(RequestError, match=field):
            requests.read_commit(short, SERVED)
