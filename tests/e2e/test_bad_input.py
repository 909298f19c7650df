"""Bad input: lies about sizes, forged handles, values that are not finite, messages that are too large; the process
lives, no line is lost, and a witness sequence keeps its bits."""

from __future__ import annotations

import grpc
import grpc.aio
import numpy as np
import pytest
from google.rpc import code_pb2
from rigs.target import ADMIN, HIDDEN, LAYER, Target, bounded_memory, reason_of, step_request

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_server.tables.sequence import slots_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Far less than what a lie asks for, far more than a request of this server needs.
MEMORY_LIMIT_BYTES = 30 << 20


@pytest.mark.parametrize(
    "shape", [[2**63 - 1, 2**63 - 1], [4194305, 4194305, 211106198978564], [2**31, HIDDEN], [-2, -HIDDEN]]
)
async def test_shapes_that_lie_take_no_memory(target: Target, shape: list[int]) -> None:
    """All other faults of a request are those of tests/server/front/test_requests.py."""
    lie = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, inline=bytes(2 * HIDDEN * 4))
    request = step_request(target, [target.witness.handle], hidden=lie)
    with bounded_memory(MEMORY_LIMIT_BYTES):
        code, _, _, status = await target.send(LAYER + "Step", request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and reason_of(status) == "INVALID_TENSOR"
    await target.check_unharmed()


async def test_forged_handles_are_not_found(target: Target) -> None:
    rng = np.random.default_rng(8)
    live = target.witness.handle
    texts = set()
    for i in range(200):
        forged = int(rng.integers(1, 2**63)) if i % 2 else live ^ (1 << int(rng.integers(24, 64)))
        reply = pb.StepResponse.FromString(
            (await target.send(LAYER + "Step", step_request(target, [forged]).SerializeToString()))[2]
        )
        status = reply.row_status[0].status
        assert status.code == code_pb2.NOT_FOUND and reason_of(status) == "SEQUENCE_UNKNOWN"
        texts.add(status.message)
    assert len(texts) == 1
    former = step_request(target, [live], server_epoch=target.epoch ^ 1)
    reply = pb.StepResponse.FromString((await target.send(LAYER + "Step", former.SerializeToString()))[2])
    assert reason_of(reply.row_status[0].status) == "STATE_LOST"
    await target.check_unharmed()


async def test_a_freed_handle_is_told_apart_from_the_next_owners(target: Target) -> None:
    async def reason(handle: int) -> str:
        body = step_request(target, [handle]).SerializeToString()
        (row,) = pb.StepResponse.FromString((await target.send(LAYER + "Step", body))[2]).row_status
        assert row.status.code == code_pb2.NOT_FOUND
        return reason_of(row.status)

    (former,) = await target.client.open_many(1)
    await target.client.close([former])
    assert await reason(former.handle) == "SEQUENCE_CLOSED"
    (owner,) = await target.client.open_many(1)
    slots = slots_of(np.array([former.handle, owner.handle], dtype=np.uint64))
    assert slots[0] == slots[1] and former.handle != owner.handle
    assert await reason(former.handle) == "SEQUENCE_CLOSED"
    await owner.decode(np.ones(HIDDEN, dtype=np.float32))
    await target.client.close([owner])
    assert (await reason(former.handle), await reason(owner.handle)) == ("SEQUENCE_UNKNOWN", "SEQUENCE_CLOSED")
    await target.check_unharmed()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, 1e-40])
async def test_values_that_are_not_finite_harm_nobody_else(target: Target, value: float) -> None:
    for place in (0, 3, 7):
        sequences = await target.client.open_many(8)
        handles = [sequence.handle for sequence in sequences]
        replies = []
        for spoiled in (False, True):
            hidden = np.random.default_rng(1).standard_normal((16, HIDDEN)).astype(np.float32)
            if spoiled:
                hidden[2 * place, 3] = value
                sequences = await target.client.open_many(8)
                handles = [sequence.handle for sequence in sequences]
            request = step_request(target, handles, hidden=wire.encode(hidden))
            code, _, reply, _ = await target.send(LAYER + "Step", request.SerializeToString())
            assert code is grpc.StatusCode.OK
            replies.append(pb.StepResponse.FromString(reply))
        target.close_strays()
        clean, spoilt = replies
        refused = {row.row for row in spoilt.row_status}
        assert refused <= {place}
        if not np.isfinite(value):
            assert reason_of(spoilt.row_status[0].status) == "NON_FINITE_INPUT"
        expected, actual = (wire.decode(r.hidden, limit_bytes=1 << 20) for r in (clean, spoilt))
        for row in set(range(8)) - {place}:
            begin = spoilt.output_start_loc[row]
            assert actual[begin : begin + 2].tobytes() == expected[2 * row : 2 * row + 2].tobytes()
    await target.check_unharmed()


async def test_messages_that_are_too_large(target: Target) -> None:
    big = np.ones(((1 << 16) // (HIDDEN * 4) + 1, HIDDEN), dtype=np.float32)
    request = step_request(target, [target.witness.handle], hidden=wire.encode(big), query_start_loc=[0, len(big)])
    with bounded_memory(MEMORY_LIMIT_BYTES):  # 32 MiB are sent, one message after the other, and lie here too
        for _ in range(4):
            code, _, _, status = await target.send(LAYER + "Step", request.SerializeToString())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(status) == "MESSAGE_TOO_LARGE"
            code, _, _, _ = await target.send(LAYER + "Step", bytes(8 << 20))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    for metadata in ([("x-long", "a" * 20_000)], [(f"x-{i}", "b" * 20) for i in range(1000)]):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await target.channel.unary_unary(ADMIN + "GetLoad")(b"", metadata=metadata, timeout=120)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await target.check_unharmed()
