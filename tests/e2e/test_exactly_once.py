"""Exactly once over a hostile network: a proxy drops requests and replies, duplicates and delays; no step is lost or
doubled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
import numpy as np
import pytest
from rigs.programs import Program, relative_error, run_together, state_of, states_differ_by

from deltaline.v1 import layer_service_pb2
from deltaline_client import AsyncClient, AsyncSequence, Retry
from deltaline_server.app import Server

TOLERANCE = 1e-4
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
NUM_CLIENTS, SEQUENCES_EACH, STEPS_EACH = 8, 5, 250


class HostileProxy(grpc.GenericRpcHandler):
    """Forwards every call, and every step of a stream, to the server, with faults: 6% of requests and 6% of replies are
    lost, 6% of requests come twice (the second one later, its reply is lost), 10% of replies are late."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._rng = np.random.default_rng(seed)
        self.faults: Counter[str] = Counter()
        self._strays: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> HostileProxy:
        self._channel: Any = grpc.aio.insecure_channel(self._address)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(None)
        await asyncio.gather(*self._strays, return_exceptions=True)
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("/StepStream"):
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, details.method))
        return grpc.unary_unary_rpc_method_handler(partial(self._call, self._channel.unary_unary(details.method)))

    async def _call(self, forward: Any, request: bytes, context: Context) -> bytes:
        await self._go(context, partial(forward, request, timeout=30))
        try:
            reply: bytes = await forward(request, timeout=30)
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            await context.abort(error.code(), error.details() or "")
        await self._come_back(context)
        return reply

    async def _stream(self, method: str, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Each step in turn; what is lost breaks the stream."""
        forward, far = self._channel.unary_unary(method.replace("StepStream", "Step")), None
        try:
            async for request in requests:
                step = layer_service_pb2.StepStreamRequest.FromString(request).step.SerializeToString()
                await self._go(context, partial(forward, step, timeout=30))
                far = far or self._channel.stream_stream(method)()
                await far.write(request)
                reply = await far.read()
                await self._come_back(context)
                yield reply
        finally:
            if far is not None:
                far.cancel()

    async def _go(self, context: Context, forward: Callable[[], Awaitable[bytes]]) -> None:
        """Faults on the way to the server. forward: sends the request once more."""
        self.faults["calls"] += 1
        fate = self._rng.random()
        if fate < 0.06:
            self.faults["request lost"] += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
        if fate > 0.94:
            self.faults["request doubled"] += 1
            self._stray(forward, float(self._rng.choice([0.0, 0.0, 0.02])))

    async def _come_back(self, context: Context) -> None:
        """Faults on the way back."""
        fate = self._rng.random()
        if fate < 0.06:
            self.faults["reply lost"] += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way back")
        if fate > 0.90:
            self.faults["reply late"] += 1
            await asyncio.sleep(0.01)

    def _stray(self, forward: Callable[[], Awaitable[bytes]], delay_s: float) -> None:
        async def send() -> None:
            await asyncio.sleep(delay_s)
            await asyncio.gather(forward(), return_exceptions=True)

        task = asyncio.create_task(send())
        self._strays.add(task)
        task.add_done_callback(self._strays.discard)


@pytest.mark.timeout(300)
async def test_10000_steps_over_a_hostile_network_are_applied_once(make_server: Callable[..., Server]) -> None:
    programs = [Program.draw(i, STEPS_EACH, 64, lengths=(1, 2, 9)) for i in range(NUM_CLIENTS * SEQUENCES_EACH)]
    async with make_server(max_sequences=128) as server, HostileProxy(server.address, seed=1) as proxy:
        retry = Retry(initial_backoff_s=0.002, max_backoff_s=0.02)

        async def one_client(number: int) -> tuple[list[AsyncSequence], list[list[Any]]]:
            mine = programs[number * SEQUENCES_EACH : (number + 1) * SEQUENCES_EACH]
            async with AsyncClient(f"127.0.0.1:{proxy.port}", retry=retry) as client:
                sequences = await client.open_many(SEQUENCES_EACH)
                return sequences, await run_together(client, sequences, mine)

        disturbed = await asyncio.gather(*(one_client(number) for number in range(NUM_CLIENTS)))
        sample = server.metrics.registry.get_sample_value
        counted = {o: sample("deltaline_steps_total", {"outcome": o}) or 0 for o in ("executed", "replayed", "joined")}
        sequences = [sequence for mine, _ in disturbed for sequence in mine]
        outputs = [output for _, mine in disturbed for output in mine]

        async with AsyncClient(server.address) as client:  # the undisturbed run
            expected = await run_together(client, undisturbed := await client.open_many(len(programs)), programs)
            assert proxy.faults["request lost"] >= 0.05 * proxy.faults["calls"]
            assert proxy.faults["reply lost"] >= 0.05 * proxy.faults["calls"]
            assert proxy.faults["request doubled"] >= 0.05 * proxy.faults["calls"]
            assert counted["executed"] == NUM_CLIENTS * SEQUENCES_EACH * STEPS_EACH == 10_000
            assert counted["replayed"] > 0 and counted["joined"] > 0
            for actual, wanted in zip(outputs, expected, strict=True):
                assert max(relative_error(a, w) for a, w in zip(actual, wanted, strict=True)) < TOLERANCE
        server.runtime.table.check_integrity()
        for one, other in zip(sequences, undisturbed, strict=True):
            assert states_differ_by(state_of(server, one), state_of(server, other)) < TOLERANCE
        described = server.runtime.table.describe(
            server.runtime.table.server_epoch, np.array([s.handle for s in sequences], dtype=np.uint64)
        )
        assert [d.spans[0].step for d in described] == [STEPS_EACH] * len(sequences)
