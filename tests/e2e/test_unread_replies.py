"""Clients of front ends that don't read: what it costs is the front end's, and bounded; others don't notice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.prefill_step import prefill_step
from rigs.server_process import ServerProcess, own_bytes
from rigs.shared_memory import mapped
from rigs.small_models import HIDDEN
from rigs.target import ADMIN, LAYER
from rigs.unreading_client import UnreadingClient
from rigs.until import until

from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_client import AsyncClient
from deltaline_server.config import Config
from deltaline_server.front.ends.forward import HELD_BYTES
from deltaline_server.front.ends.memory import link_bytes, most_bytes
from deltaline_server.front.ends.reader import GIVEN_BYTES
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES

NUM_CLIENTS, NUM_TOKENS = 3, 16_000
REPLY_BYTES = NUM_TOKENS * HIDDEN * 4  # what a default client takes, nearly
MIB = 2**20
OPTIONS = ("--front-ends", "1", "--shared-memory-bytes", str(2 * REPLY_BYTES), "--metrics-port", "0")


async def small_step_of_a_large_reply(address: str) -> bytes:
    """The bytes of a step that was done, whose reply has REPLY_BYTES; the same step again gets the kept reply."""
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:

        async def call(method: str, request: Any) -> bytes:
            reply: bytes = await channel.unary_unary(method)(request.SerializeToString())
            return reply

        made = admin.CreateSharedMemoryResponse.FromString(
            await call(ADMIN + "CreateSharedMemory", admin.CreateSharedMemoryRequest(size_bytes=REPLY_BYTES))
        )
        mapped(made)[:REPLY_BYTES].view(np.float32)[:] = 1.0
        opened = pb.OpenSequencesResponse.FromString(
            await call(LAYER + "OpenSequences", pb.OpenSequencesRequest(count=1))
        )
        place = tensor_pb2.SharedSlice(region=made.region, offset=0)
        hidden = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[NUM_TOKENS, HIDDEN], shared=place)
        step = prefill_step(opened, hidden)
        assert len(await call(LAYER + "Step", step)) > REPLY_BYTES
        return step.SerializeToString()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    async with ServerProcess(tmp_path, *OPTIONS) as made:
        yield made


@pytest.mark.parametrize("num_replies", [40, pytest.param(250, marks=pytest.mark.sweep)])
async def test_replies_that_nobody_reads_are_bounded(server: ServerProcess, num_replies: int) -> None:
    (pid,) = server.front_ends

    def refused() -> float:
        return server.count('deltaline_refused_total{reason="REPLIES_UNREAD"}')

    step = await small_step_of_a_large_reply(server.address)
    core_before, before = own_bytes(server.pid), own_bytes(pid)
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            client = stack.enter_context(closing(UnreadingClient(server.address)))
            for _ in range(num_replies):
                client.call(LAYER + "Step", step)
        total = NUM_CLIENTS * num_replies
        await until(lambda: server.count('deltaline_steps_total{outcome="replayed"}') + refused() == total)
        async with AsyncClient(server.address) as reads:
            assert (await (await reads.open()).prefill(np.ones((NUM_TOKENS, HIDDEN), np.float32))).shape[
                0
            ] == NUM_TOKENS
        figures = [own_bytes(server.pid) - core_before, own_bytes(server.pid, "VmHWM") - core_before]
        figures += [own_bytes(pid) - before, own_bytes(pid, "VmHWM") - before]
        core, core_most, _, most = figures
        print(
            f"{total} replies, MiB that the core took, at most, the front end, at most:", *(n // MIB for n in figures)
        )
    assert server.front_ends == [pid]
    message_bytes = Config(random_init="config.json").inline_limit_bytes + MESSAGE_SLACK_BYTES
    assert own_bytes(pid, "VmHWM") < most_bytes(message_bytes) + link_bytes(message_bytes)  # what `deltaline size` says
    given = NUM_CLIENTS * (GIVEN_BYTES + REPLY_BYTES)
    assert most < HELD_BYTES + given + link_bytes(message_bytes) + 64 * MIB
    assert core < 64 * MIB and core_most < 64 * MIB  # replies that wait are views of those that it keeps
