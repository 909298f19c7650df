"""What tests assert with is seen to fail: a helper that lets everything pass would take its tests with it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from rigs.garbage import nothing_left
from rigs.layer_calls import refused
from rigs.scheduler_rig import refuses
from rigs.until import until

from deltaline_server.errors import Reason, RequestError

FAILED = pytest.fail.Exception


class Circle:
    """Refers to itself: only the garbage collector ends it."""

    def __init__(self) -> None:
        self.own = self


async def test_until_waits_for_its_condition_and_no_longer_than_it_may() -> None:
    looks = iter([False, False, True])
    await until(lambda: next(looks))
    assert list(looks) == []
    with pytest.raises(TimeoutError):
        await until(lambda: False, 0.02)


def test_refuses_wants_an_error_of_its_reason() -> None:
    with refuses(Reason.QUEUE_FULL) as caught:
        raise RequestError(Reason.QUEUE_FULL, "full")
    assert caught.value.refusal.reason is Reason.QUEUE_FULL
    with pytest.raises(FAILED, match="DID NOT RAISE"), refuses(Reason.QUEUE_FULL):
        pass
    with pytest.raises(AssertionError), refuses(Reason.QUEUE_FULL):
        raise RequestError(Reason.STEP_GAP, "another")


async def test_refused_wants_a_call_that_ends_with_an_error() -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata())
    answered, failed = (asyncio.get_running_loop().create_future() for _ in range(2))
    failed.set_exception(error)
    assert await refused(failed) is error
    answered.set_result(b"")
    with pytest.raises(FAILED, match="DID NOT RAISE"):
        await refused(answered)


def test_nothing_left_sees_what_refers_to_itself() -> None:
    with nothing_left(__name__):
        object()
    with pytest.raises(AssertionError), nothing_left(__name__):
        Circle()
