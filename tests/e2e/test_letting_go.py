"""What a step held is let go when it is over, and not when the garbage collector comes or the stream goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from e2e.conftest import server_of
from rigs.garbage import nothing_left
from rigs.small_models import GATED_DELTA_NET
from rigs.target import ADMIN, HIDDEN, LAYER, Target, reason_of, step_request, target_of
from rigs.until import until

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

REGION_BYTES = 1 << 20
NUM_TOKENS = 1000
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory, device: str) -> AsyncIterator[Target]:
    """A server with room for one region."""
    server = server_of(GATED_DELTA_NET, tmp_path_factory.mktemp("target"), device, shared_memory_bytes=REGION_BYTES)
    async with target_of(server) as target:
        yield target


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector does not come meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def create(target: Target) -> int:
    """Make the one region that there is room for.

    Asks until there is: a thread that told of a result lets go of the step a moment later.
    """
    body = admin.CreateSharedMemoryRequest(size_bytes=REGION_BYTES).SerializeToString()
    async with asyncio.timeout(60.0):
        while (answer := await target.send(ADMIN + "CreateSharedMemory", body))[0] is RESOURCE_EXHAUSTED:  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.005)
    code, text, reply, _ = answer
    assert not text, (code, text)
    return admin.CreateSharedMemoryResponse.FromString(reply).region


async def release(target: Target, region: int) -> None:
    body = admin.ReleaseSharedMemoryRequest(region=region).SerializeToString()
    await target.send(ADMIN + "ReleaseSharedMemory", body)


def shared_step(target: Target, handle: int, region: int, output_offset: int) -> pb.StepRequest:
    """A first prefill: two tokens at the beginning of a region."""
    place = tensor_pb2.SharedSlice(region=region, offset=0)
    hidden = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2, HIDDEN], shared=place)
    output = pb.OutputSlice(region=region, offset=output_offset, size_bytes=2 * HIDDEN * 4)
    step: pb.StepRequest = step_request(target, [handle], hidden=hidden, output_slice=output)
    return step


@pytest.mark.parametrize("method", ["Step", "DescribeSequences"])
async def test_an_answered_call_leaves_nothing_to_the_garbage_collector(target: Target, method: str) -> None:
    sequence = await target.client.open()
    handles: Any = {"server_epoch": sequence.server_epoch, "sequence": [sequence.handle]}
    hidden = wire.encode(np.ones((1, HIDDEN), dtype=np.float32))
    step = step_request(target, [sequence.handle], hidden=hidden, query_start_loc=[0, 1])
    body = (step if method == "Step" else pb.DescribeSequencesRequest(**handles)).SerializeToString()
    with nothing_left("deltaline", "grpc._cython.cygrpc._ServicerContext"):
        assert (await target.send(LAYER + method, body))[0] is grpc.StatusCode.OK
        await asyncio.sleep(0.1)
    await sequence.close()


@pytest.mark.parametrize("output_offset", [0, 4096])
@pytest.mark.usefixtures("no_collector")
async def test_an_idle_stream_keeps_no_released_region(target: Target, output_offset: int) -> None:
    stream, sequence = target.channel.stream_stream(LAYER + "StepStream")(), await target.client.open()
    region = await create(target)
    message = pb.StepStreamRequest(step=shared_step(target, sequence.handle, region, output_offset))
    await stream.write(message.SerializeToString())
    answer = pb.StepStreamResponse.FromString(await stream.read())
    assert answer.WhichOneof("result") == ("step" if output_offset else "status")
    await sequence.close()
    await release(target, region)
    await release(target, await create(target))
    stream.cancel()


@pytest.mark.usefixtures("no_collector")
async def test_a_refused_call_keeps_no_released_region(target: Target) -> None:
    region = await create(target)
    step = shared_step(target, target.witness.handle, region, 0)
    _, _, _, status = await target.send(LAYER + "Step", step.SerializeToString())
    assert reason_of(status) == "INVALID_SHARED_MEMORY"
    await release(target, region)
    await release(target, await create(target))


@pytest.mark.parametrize("fault", ["span", "shape"])
@pytest.mark.parametrize("method", ["Step", "StepStream"])
@pytest.mark.usefixtures("no_collector")
async def test_refused_messages_do_not_stay_in_memory(target: Target, method: str, fault: str) -> None:
    hidden = wire.encode(np.ones((NUM_TOKENS, HIDDEN), dtype=np.float32))
    step = step_request(
        target, [target.witness.handle], hidden=hidden, query_start_loc=[0, NUM_TOKENS], span=9 * (fault == "span")
    )
    if fault == "shape":
        step.hidden.shape[0] -= 1
    body = step.SerializeToString()
    if method == "StepStream":
        body = pb.StepStreamRequest(step=step).SerializeToString()
    for _ in range(5):
        await target.send(LAYER + method, body)
    await until(lambda: not held(hidden))


def held(hidden: tensor_pb2.Tensor) -> list[Any]:
    """What is alive of the messages that had these hidden states."""
    return [one for one in gc.get_objects() if type(one) is memoryview and one.nbytes == len(hidden.inline)]


@pytest.mark.usefixtures("no_collector")
async def test_an_idle_stream_keeps_no_message(target: Target) -> None:
    hidden, sequence = wire.encode(np.ones((NUM_TOKENS, HIDDEN), dtype=np.float32)), await target.client.open()
    step = step_request(target, [sequence.handle], hidden=hidden, query_start_loc=[0, NUM_TOKENS])
    stream = target.channel.stream_stream(LAYER + "StepStream")()
    await stream.write(pb.StepStreamRequest(step=step).SerializeToString())
    answer = pb.StepStreamResponse.FromString(await stream.read())
    assert answer.WhichOneof("result") == "step"
    await sequence.close()  # and with it the kept reply
    await until(lambda: not held(hidden))
    stream.cancel()
