"""Bad input: whatever bytes come, the process lives, no line is lost, and a witness sequence keeps its bits.

Random bodies and mutated valid requests for every method, then the known faults of shapes, types, offsets, handles,
steps, positions and accepted counts, each with the status that it must get.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from deltaline import wire
from deltaline.v1 import admin_service_pb2, layer_service_pb2, tensor_pb2
from deltaline_client import AsyncClient, AsyncSequence
from deltaline_server.app import Server

pb = layer_service_pb2
HIDDEN = 64
NUM_BODIES = 2000
LAYER, ADMIN = "/deltaline.v1.LayerService/", "/deltaline.v1.AdminService/"
# Nothing of the inside may show in an error's text.
LEAK = re.compile(r"/[a-z]+/|0x[0-9a-f]{6}|Traceback|Error\b|<class|object at|deltaline_server|\.py\b")
NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


class Target:
    """A server with a witness sequence, and raw calls to it."""

    def __init__(self, server: Server, client: AsyncClient, witness: AsyncSequence, twin: AsyncSequence) -> None:
        self.server, self.client, self.witness, self.twin = server, client, witness, twin
        self.epoch = server.runtime.table.server_epoch
        self.channel: Any = grpc.aio.insecure_channel(server.address)
        self.lines_free = server.runtime.table.num_lines - server.runtime.table.num_lines_used
        self._rng = np.random.default_rng(99)

    async def send(self, method: str, body: bytes) -> tuple[grpc.StatusCode, str, bytes, Any]:
        """Call a method with raw bytes: its code, its text, its reply, and its google.rpc.Status if there is one."""
        try:
            if method.endswith("StepStream"):
                call = self.channel.stream_stream(method)(iter([body]), timeout=20)
                reply = b"".join([message async for message in call])
            else:
                reply = await self.channel.unary_unary(method)(body, timeout=20)
        except grpc.aio.AioRpcError as error:
            status = rpc_status.from_call(error)
            return error.code(), error.details() or "", b"", status
        return grpc.StatusCode.OK, "", reply, None

    async def check_unharmed(self) -> None:
        """Free lines are what they were; the witness and its untouched twin answer with the same bits."""
        table = self.server.runtime.table
        table.check_integrity()
        assert table.num_lines - table.num_lines_used == self.lines_free
        token = self._rng.standard_normal(HIDDEN).astype(np.float32)
        mine, theirs = await self.witness.decode(token), await self.twin.decode(token)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


@pytest.fixture
async def target(make_server: Callable[..., Server]) -> AsyncIterator[Target]:
    server = make_server(inline_limit_bytes=1 << 16, drain_timeout_s=600)
    async with server, AsyncClient(server.address) as client:
        witness, twin = await client.open_many(2)
        prompt = np.random.default_rng(4).standard_normal((9, HIDDEN)).astype(np.float32)
        for sequence in (witness, twin):
            await sequence.prefill(prompt)
        target = Target(server, client, witness, twin)
        yield target
        await target.channel.close()


def step_request(target: Target, handles: list[int], **changes: Any) -> Any:
    """A valid first step (a prefill of two tokens) for each handle, with changes by field name."""
    count = len(handles)
    request = pb.StepRequest(
        server_epoch=target.epoch,
        sequence=handles,
        kind=[pb.ROW_KIND_PREFILL] * count,
        step=[1] * count,
        position=[0] * count,
        accepted=[-1] * count,
        query_start_loc=list(range(0, 2 * count + 1, 2)),
        hidden=wire.encode(np.ones((2 * count, HIDDEN), dtype=np.float32)),
    )
    for name, value in changes.items():
        field = getattr(request, name)
        if isinstance(value, list):
            del field[:]
            field.extend(value)
        elif hasattr(field, "CopyFrom"):
            field.CopyFrom(value)
        else:
            setattr(request, name, value)
    return request


def valid_requests(target: Target, handle: int) -> dict[str, Any]:
    """One valid request of each method."""
    step = step_request(target, [handle])
    return {
        LAYER + "OpenSequences": pb.OpenSequencesRequest(count=1, lease_ms=1000),
        LAYER + "CloseSequences": pb.CloseSequencesRequest(server_epoch=target.epoch, sequence=[handle]),
        LAYER + "DescribeSequences": pb.DescribeSequencesRequest(server_epoch=target.epoch, sequence=[handle]),
        LAYER + "RenewLeases": pb.RenewLeasesRequest(server_epoch=target.epoch, sequence=[handle], lease_ms=1000),
        LAYER + "Step": step,
        LAYER + "CommitSequences": pb.CommitSequencesRequest(
            server_epoch=target.epoch, sequence=[handle], step=[1], accepted=[0]
        ),
        LAYER + "StepStream": pb.StepStreamRequest(correlation_id=7, step=step),
        ADMIN + "GetServerInfo": admin_service_pb2.GetServerInfoRequest(),
        ADMIN + "GetLoad": admin_service_pb2.GetLoadRequest(),
        ADMIN + "Drain": admin_service_pb2.DrainRequest(timeout_ms=600_000),
    }


def mutate(body: bytes, rng: np.random.Generator) -> bytes:
    """Flip, cut, insert or repeat some bytes, mostly near the front where the small fields are."""
    data = bytearray(body or b"\x00")
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, min(len(data), 120) if rng.random() < 0.8 else len(data)))
        match int(rng.integers(0, 5)):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at] = int(rng.integers(0, 256))
            case 2:
                del data[at : at + int(rng.integers(1, 9))]
            case 3:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                data[at:at] = data[at : at + int(rng.integers(1, 40))]
        data = data or bytearray(1)
    return bytes(data)


def row_statuses(reply: bytes, *, stream: bool) -> list[Any]:
    """Statuses of refused rows in a reply of Step or StepStream."""
    if not stream:
        return [row.status for row in pb.StepResponse.FromString(reply).row_status]
    answer = pb.StepStreamResponse.FromString(reply)
    return [answer.status] if answer.HasField("status") else [row.status for row in answer.step.row_status]


async def close_strays(target: Target) -> None:
    """Close what the random requests opened, as its lease would."""
    table = target.server.runtime.table
    kept = {target.witness.handle, target.twin.handle}
    strays = [handle for handle in table._handle.tolist() if handle and handle not in kept]
    if strays:
        table.close(table.server_epoch, np.array(strays, dtype=np.uint64))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutated", [pytest.param(False, id="random"), pytest.param(True, id="mutated")])
@pytest.mark.parametrize(
    "method",
    [
        *(LAYER + m.name for m in pb.DESCRIPTOR.services_by_name["LayerService"].methods),
        *(ADMIN + m.name for m in admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods),
    ],
)
async def test_bodies_that_nobody_meant(target: Target, method: str, mutated: bool) -> None:
    rng = np.random.default_rng(sum(method.encode()) + mutated)
    (victim,) = await target.client.open_many(1)
    valid = valid_requests(target, victim.handle)[method].SerializeToString()
    for _ in range(NUM_BODIES // 50):
        bodies = [
            mutate(valid, rng) if mutated else rng.bytes(int(rng.choice([0, 1, 2, 5, 20, 100, 3000])))
            for _ in range(50)
        ]
        for code, text, reply, status in await asyncio.gather(*(target.send(method, body) for body in bodies)):
            assert code not in NEVER, (code, text)
            assert not LEAK.search(text), text
            if code is not grpc.StatusCode.OK:
                assert status is not None and status.details, (code, text)
            elif method.endswith(("Step", "StepStream")) and reply:
                for row_status in row_statuses(reply, stream=method.endswith("Stream")):
                    assert row_status.code not in (2, 13) and not LEAK.search(row_status.message), row_status
        await close_strays(target)
    await target.check_unharmed()


def reason_of(status: status_pb2.Status) -> str:
    """The reason in a google.rpc.Status."""
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == "deltaline"
    return str(info.reason)


def tensor(dtype: int, shape: list[int], data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, inline=data)  # type: ignore[arg-type]


F32, BF16 = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_BFLOAT16
FULL = bytes(2 * HIDDEN * 4)
SHAPES = [
    [], [HIDDEN], [3, HIDDEN], [1, HIDDEN], [2, HIDDEN - 1], [2, HIDDEN, 1], [2, 1, HIDDEN, 1, 1], [1] * 33,
    [-2, -HIDDEN], [-1, HIDDEN], [0, HIDDEN], [2, 0], [2**31, HIDDEN], [2**63 - 1, 2], [2**32, 2**32],
    [4194305, 4194305, 211106198978564], [2**31, 2**31, 2, 2], [HIDDEN, 2], [2**63 - 1, 2**63 - 1],
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_shapes_that_lie(target: Target, shape: list[int]) -> None:
    request = step_request(target, [target.witness.handle], hidden=tensor(F32, shape, FULL))
    code, _, _, status = await target.send(LAYER + "Step", request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and reason_of(status) in ("INVALID_TENSOR", "INVALID_BATCH")
    await target.check_unharmed()


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        pytest.param(0, FULL, id="unspecified"),
        pytest.param(99, FULL, id="unknown"),
        pytest.param(BF16, FULL, id="bf16-with-fp32-bytes"),
        pytest.param(BF16, FULL[: len(FULL) // 2], id="bf16"),
        pytest.param(F32, FULL[:-1], id="a-byte-short"),
        pytest.param(F32, FULL + b"\x00", id="a-byte-long"),
        pytest.param(F32, b"", id="empty"),
    ],
)
async def test_types_that_lie(target: Target, dtype: int, data: bytes) -> None:
    request = step_request(target, [target.witness.handle], hidden=tensor(dtype, [2, HIDDEN], data))
    code, _, _, status = await target.send(LAYER + "Step", request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and reason_of(status) == "INVALID_TENSOR"
    await target.check_unharmed()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"sequence": []}, "INVALID_BATCH", id="no-rows"),
        pytest.param({"query_start_loc": [0]}, "INVALID_BATCH", id="offsets-missing"),
        pytest.param({"query_start_loc": [1, 2, 4]}, "INVALID_BATCH", id="offsets-start"),
        pytest.param({"query_start_loc": [0, 2, 3]}, "INVALID_BATCH", id="offsets-end"),
        pytest.param({"query_start_loc": [0, 5, 4]}, "INVALID_BATCH", id="offsets-decrease"),
        pytest.param({"query_start_loc": [0, 0, 4]}, "INVALID_BATCH", id="empty-row"),
        pytest.param({"query_start_loc": [0, 2**32 - 1, 4]}, "INVALID_BATCH", id="offsets-huge"),
        pytest.param({"kind": [1]}, "INVALID_BATCH", id="kinds-missing"),
        pytest.param({"kind": [1, 0]}, "INVALID_BATCH", id="kind-unspecified"),
        pytest.param({"kind": [1, 9]}, "INVALID_BATCH", id="kind-unknown"),
        pytest.param({"kind": [1, 2]}, "INVALID_BATCH", id="decode-of-two"),
        pytest.param({"step": [1]}, "INVALID_BATCH", id="steps-missing"),
        pytest.param({"position": [0, 0, 0]}, "INVALID_BATCH", id="positions-extra"),
        pytest.param({"accepted": [-1]}, "INVALID_BATCH", id="accepted-missing"),
        pytest.param({"span": 1}, "UNKNOWN_SPAN", id="span"),
        pytest.param({"server_epoch": 0}, "INVALID_REQUEST", id="epoch-zero"),
        pytest.param({"priority": 8}, "INVALID_REQUEST", id="priority"),
        pytest.param({"output": 7}, "INVALID_REQUEST", id="output"),
    ],
)
async def test_batches_that_are_malformed(target: Target, changes: dict[str, Any], reason: str) -> None:
    request = step_request(target, [target.witness.handle, target.twin.handle], **changes)
    code, text, _, status = await target.send(LAYER + "Step", request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and reason_of(status) == reason, text
    await target.check_unharmed()


async def test_a_handle_twice_and_too_many_rows(target: Target) -> None:
    handle = target.witness.handle
    for handles, reason in (([handle, handle], "DUPLICATE_SEQUENCE"), (list(range(1, 66)), "INVALID_BATCH")):
        request = step_request(target, handles)
        code, _, _, status = await target.send(LAYER + "Step", request.SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT and reason_of(status) == reason
    await target.check_unharmed()


async def test_a_thousand_forged_handles_are_not_found(target: Target) -> None:
    rng = np.random.default_rng(8)
    live = target.witness.handle
    texts = set()
    for i in range(1000):
        forged = int(rng.integers(1, 2**63)) if i % 2 else live ^ (1 << int(rng.integers(24, 64)))
        reply = pb.StepResponse.FromString(
            (await target.send(LAYER + "Step", step_request(target, [forged]).SerializeToString()))[2]
        )
        status = reply.row_status[0].status
        assert status.code == 5 and reason_of(status) == "SEQUENCE_UNKNOWN"
        texts.add(status.message)
    assert len(texts) == 1
    former = step_request(target, [live], server_epoch=target.epoch ^ 1)
    reply = pb.StepResponse.FromString((await target.send(LAYER + "Step", former.SerializeToString()))[2])
    assert reason_of(reply.row_status[0].status) == "STATE_LOST"
    await target.check_unharmed()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, 1e-40])
async def test_values_that_are_not_finite_harm_nobody_else(target: Target, value: float) -> None:
    for place in range(8):
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
        await close_strays(target)
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
    code, _, _, status = await target.send(LAYER + "Step", request.SerializeToString())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(status) == "MESSAGE_TOO_LARGE"
    code, _, _, _ = await target.send(LAYER + "Step", bytes(8 << 20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    for metadata in ([("x-long", "a" * 20_000)], [(f"x-{i}", "b" * 20) for i in range(1000)]):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await target.channel.unary_unary(ADMIN + "GetLoad")(b"", metadata=metadata, timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    bomb: Any = grpc.aio.insecure_channel(target.server.address, compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await bomb.unary_unary(LAYER + "Step")(bytes(64 << 20), timeout=60)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # the server takes no compressed message
    await bomb.close()
    await target.check_unharmed()
