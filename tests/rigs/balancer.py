"""What stands before several servers: it sends each call to one of them, by a policy that a test chooses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import grpc

Policy: TypeAlias = Callable[[Mapping[str, str]], int]
"""Chooses a server, by its number, for a call with some metadata; NONE to let the call fail."""
NONE = -1


class Routed(NamedTuple):
    """A call that came by."""

    method: str
    metadata: Mapping[str, str]
    server: int


class Balancer(grpc.GenericRpcHandler):
    """Forwards calls as bytes, each to the server that `policy` chooses. routed: all that came."""

    def __init__(self, channels: Sequence[Any], policy: Policy) -> None:
        self._channels, self.policy = channels, policy
        self.address = ""
        self.routed: list[Routed] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: self._forward(method, requests, context))

    def _forward(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        metadata = {key: value for key, value in context.invocation_metadata() if key != "user-agent"}
        server = self.policy(metadata)
        self.routed.append(Routed(method, metadata, server))
        if server == NONE:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no server")
        call: Any = self._channels[server].stream_stream(method)(
            _until_over(requests), metadata=tuple(metadata.items())
        )
        context.add_callback(call.cancel)
        try:
            yield from call
        except grpc.RpcError:
            context.set_trailing_metadata(call.trailing_metadata())
            context.abort(call.code(), call.details())

    def servers_of(self, method: str) -> set[int]:
        """Where calls of a method went."""
        return {routed.server for routed in self.routed if routed.method.endswith(f"/{method}")}


def _until_over(requests: Iterator[bytes]) -> Iterator[bytes]:
    """The requests of a call, which its client may leave."""
    with suppress(grpc.RpcError):
        yield from requests


@contextmanager
def balanced(
    addresses: Sequence[str],
    policy: Policy,
    *,
    server_credentials: grpc.ServerCredentials | None = None,
    channel_credentials: grpc.ChannelCredentials | None = None,
    listen: str = "127.0.0.1:0",
) -> Iterator[Balancer]:
    """A balancer before servers at some addresses."""
    with ExitStack() as stack:
        channels: list[Any] = []
        for address in addresses:
            made = grpc.insecure_channel(address)
            if channel_credentials is not None:
                made = grpc.secure_channel(address, channel_credentials)
            channels.append(stack.enter_context(made))
        balancer = Balancer(channels, policy)
        pool = stack.enter_context(ThreadPoolExecutor(64))
        server = grpc.server(pool, handlers=[balancer], options=[("grpc.so_reuseport", 0)])
        port = (
            server.add_insecure_port(listen)
            if server_credentials is None
            else server.add_secure_port(listen, server_credentials)
        )
        balancer.address = f"127.0.0.1:{port}"
        server.start()
        stack.callback(lambda: server.stop(None).wait())
        yield balancer


def round_robin(num_servers: int) -> Policy:
    """One server after another, whatever a call carries."""
    numbers = count()
    return lambda metadata: next(numbers) % num_servers


def by_affinity(num_servers: int) -> Policy:
    """The same server for the same affinity."""

    def chosen(metadata: Mapping[str, str]) -> int:
        return hashlib.sha256(metadata["deltaline-affinity"].encode()).digest()[0] % num_servers

    return chosen


def by_name(names: Sequence[str]) -> Policy:
    """The server that a call means; those that mean none go round."""
    otherwise = round_robin(len(names))

    def chosen(metadata: Mapping[str, str]) -> int:
        meant = metadata.get("deltaline-server")
        return otherwise(metadata) if meant is None else names.index(meant)

    return chosen
