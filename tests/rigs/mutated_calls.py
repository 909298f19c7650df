"""Calls of every method with messages, metadata and deadlines that nobody meant; each follows from a seed and a number.

Each begins as a valid call about what the server really holds: sequences, snapshots, a region of shared memory,
adapters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules
from rigs.mutation import mutated
from rigs.principals import token_of
from rigs.small_models import GATED_DELTA_NET, HIDDEN
from safetensors.torch import save

from deltaline import wire
from deltaline.v1 import adapter_service_pb2, admin_service_pb2, prefix_pb2, state_service_pb2, tensor_pb2
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.models.config import ModelConfig

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in (pb, state_service_pb2, adapter_service_pb2, admin_service_pb2, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# What has more fields is called more often.
_OFTEN = {"Step": 6, "StepStream": 4, "CommitSequences": 3, "OpenSequences": 2}
_PATHS = [path for path, method in METHODS.items() for _ in range(_OFTEN.get(method.name, 1))]
_ADAPTER_NAMES = ("a", "b", "c.d_e-f")
_KEYS = (b"a" * 16, b"b" * 32, b"c" * 64)
_PIECE = 1 << 14
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class MutatedCall(NamedTuple):
    """A call. bodies: its messages. timeout_s: short ones may end it."""

    seed: int
    number: int
    path: str
    bodies: Sequence[bytes]
    metadata: tuple[tuple[str, str | bytes], ...]
    timeout_s: float

    def __str__(self) -> str:
        bodies = [body[:2000].hex() + "..." * (len(body) > 2000) for body in self.bodies]
        how = f"metadata={self.metadata} timeout_s={self.timeout_s} bodies={bodies}"
        return f"seed {self.seed} number {self.number}: {self.path} {how}"


@dataclass(frozen=True)
class Held:
    """What the valid calls are about. victims, snapshots: handles and ids, with which anything may be done. level:
    handles of sequences that are not stepped, so that their spans are at one position. state, whole: a snapshot and a
    sequence, exported."""

    epoch: int
    victims: Sequence[int]
    level: Sequence[int]
    snapshots: Sequence[bytes]
    state: bytes
    whole: bytes
    region: int
    name: str
    """Of the principal who calls."""


def draw(seed: int, number: int, held: Held) -> MutatedCall:
    """The mutated call of a seed and a number."""
    rng = Random(seed << 40 | number)
    path = rng.choice(_PATHS)
    method = METHODS[path]
    bodies = [message.SerializeToString() for message in _valid(method, held, rng)]
    for _ in range(rng.choice((1, 1, 2, 3)) if method.client_streaming else 1):
        at = rng.randrange(len(bodies))
        bodies[at] = mutated(bodies[at], method.input_type, rng)
    if method.client_streaming and rng.random() < 0.05:
        del bodies[rng.randrange(len(bodies)) :]
    timeout_s = rng.choice((0.0005, 0.002, 0.01)) if rng.random() < 0.03 else 60.0
    if method.name == "Watch":  # it does not end
        timeout_s = 0.02
    return MutatedCall(seed, number, path, bodies, _metadata(held.name, rng), timeout_s)


def _metadata(name: str, rng: Random) -> tuple[tuple[str, str | bytes], ...]:
    """What a principal's call carries, at times spoiled."""
    token = f"Bearer {token_of(name)}"
    if rng.random() < 0.9:
        return (("authorization", token),)
    at = rng.randrange(len(token))
    shown: tuple[tuple[str, ...], ...] = (
        (token[:at],),
        (token[:at] + chr(rng.randrange(33, 127)) + token[at + 1 :],),
        (token, token),
        ("Bearer " + "x" * 3000,),
        (token.upper(),),
        (f"Basic {token_of(name)}",),
        (f"Bearer {token_of('nobody')}",),
        ("",),
        (),
    )
    more: list[tuple[str, str | bytes]] = [
        ("traceparent", _TRACE[: rng.randrange(len(_TRACE))]),
        ("traceparent", _TRACE.replace("0", rng.choice("zZ-\x7e f"))),
        ("tracestate", "=,=" * 200),
        ("baggage", "%zz=%00,;"),
        ("deltaline-affinity-bin", rng.randbytes(rng.choice((0, 1, 16, 2000)))),
        ("grpc-trace-bin", rng.randbytes(rng.choice((0, 29)))),
        ("grpc-tags-bin", rng.randbytes(7)),
        ("x" * rng.choice((1, 500)), "y" * rng.choice((0, 500))),
    ]
    headers = rng.choice(shown) if rng.random() < 0.5 else (token,)
    return (*(("authorization", header) for header in headers), *rng.sample(more, rng.randrange(4)))


def _valid(method: MethodDescriptor, held: Held, rng: Random) -> list[Message]:
    """The messages of a valid call."""
    epoch, some = held.epoch, rng.sample(held.victims, rng.choice((1, 1, 2, len(held.victims))))
    made: Any
    match method.name:
        case "OpenSequences":
            token = rng.choice((b"", b"t" * 16, rng.randbytes(16), rng.randbytes(16)))
            adapter = rng.choice(("", "", "", "", _ADAPTER_NAMES[0]))
            made = pb.OpenSequencesRequest(count=rng.choice((1, 3)), lease_ms=1000, open_token=token, adapter=adapter)
            if rng.random() < 0.2:
                made.adapter, made.snapshot_id = "", rng.choice(held.snapshots)
            elif rng.random() < 0.5:
                made.prefix.CopyFrom(_prefix(rng))
                made.reuse = rng.choice((0, 1, 2))
        case "CloseSequences":
            made = pb.CloseSequencesRequest(server_epoch=epoch, sequence=some[:1])
        case "DescribeSequences":
            made = pb.DescribeSequencesRequest(server_epoch=epoch, sequence=some)
        case "RenewLeases":
            made = pb.RenewLeasesRequest(server_epoch=epoch, sequence=some, lease_ms=60_000)
        case "Step":
            made = _step(held, some, rng)
        case "StepStream":
            steps = [_step(held, [rng.choice(held.victims)], rng) for _ in range(rng.randrange(1, 9))]
            trace = rng.choice((b"", _TRACE.encode()))
            return [pb.StepStreamRequest(correlation_id=i, step=s, traceparent=trace) for i, s in enumerate(steps)]
        case "CommitSequences":
            count = len(some)
            step, accepted = [rng.choice((1, 2))] * count, [rng.randrange(4)] * count
            made = pb.CommitSequencesRequest(server_epoch=epoch, sequence=some, step=step, accepted=accepted)
        case "ForkSequences" | "CreateSnapshots":
            sequence = rng.choice((some[:2], held.level))
            what: dict[str, Any] = {"count": rng.choice((1, 2))}
            if method.name == "CreateSnapshots":
                keys = [rng.choice((b"", _KEYS[0], _KEYS[1])) for _ in sequence]
                what = {"pinned": rng.random() < 0.5, "prefix_key": rng.choice(([], keys))}
            made = message_factory.GetMessageClass(method.input_type)(
                request_id=_request_id(rng), server_epoch=epoch, sequence=sequence, lease_ms=1000, **what
            )
        case "RestoreSequences" | "RenewSnapshots":
            made = message_factory.GetMessageClass(method.input_type)(
                request_id=_request_id(rng), snapshot_id=rng.choices(held.snapshots, k=2), lease_ms=1000
            )
        case "ReleaseSnapshots":
            made = state_service_pb2.ReleaseSnapshotsRequest(
                request_id=_request_id(rng), snapshot_id=[rng.choice((bytes(16), rng.choice(held.snapshots)))]
            )
        case "FindSnapshots":
            adapter = rng.choice(("", "", _ADAPTER_NAMES[0]))
            made = state_service_pb2.FindSnapshotsRequest(prefix=_prefix(rng), adapter=adapter)
        case "ListSnapshots":
            after = rng.choice((b"", bytes(16), rng.choice(held.snapshots)))
            made = state_service_pb2.ListSnapshotsRequest(after=after, limit=rng.choice((0, 1, 4096)))
        case "ExportState":
            named = {"server_epoch": epoch, "sequence": some[0]}
            what = rng.choice(({"snapshot_id": rng.choice(held.snapshots)}, named))
            made = state_service_pb2.ExportStateRequest(**what)
        case "ImportState":
            content, what = rng.choice(
                ((held.state, {"pinned": rng.random() < 0.1}), (held.whole, {"sequence": True, "lease_ms": 1000}))
            )
            first = state_service_pb2.ImportStateRequest(request_id=_request_id(rng), **what)
            pieces = [content[i : i + _PIECE] for i in range(0, len(content), _PIECE)]
            return [first, *(state_service_pb2.ImportStateRequest(chunk=piece) for piece in pieces)]
        case "MoveSequences":
            made = state_service_pb2.MoveSequencesRequest(
                request_id=_request_id(rng), server_epoch=epoch, sequence=some, target="127.0.0.1:1"
            )
        case "CreateSharedMemory":
            made = admin_service_pb2.CreateSharedMemoryRequest(size_bytes=100, lease_ms=1000)
        case "ReleaseSharedMemory":
            made = admin_service_pb2.ReleaseSharedMemoryRequest(region=rng.choice((1, held.region)))
        case "Drain":
            made = admin_service_pb2.DrainRequest(timeout_ms=600_000)
        case "LoadAdapter":
            return _load_messages(rng)
        case "UnloadAdapter":
            made = adapter_service_pb2.UnloadAdapterRequest(name=rng.choice(_ADAPTER_NAMES), drain=True)
        case "Check" | "Watch":
            made = health_pb2.HealthCheckRequest(service=rng.choice(("", "deltaline.v1.LayerService")))
        case "ServerReflectionInfo":
            return [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="deltaline.v1.LayerService"),
            ]
        case _:
            made = message_factory.GetMessageClass(method.input_type)()
    return [made]


def _prefix(rng: Random) -> prefix_pb2.PrefixKeys:
    """The first few keys, at the positions that valid sequences come to."""
    count = rng.randrange(4)
    return prefix_pb2.PrefixKeys(
        key=_KEYS[:count], position=range(1, count + 1), prompt_tokens=count + rng.choice((1, 9))
    )


def _request_id(rng: Random) -> bytes:
    """At times one that has come before."""
    return rng.choice((bytes([rng.randrange(4)] * 16), rng.randbytes(16), rng.randbytes(16)))


def _step(held: Held, handles: Sequence[int], rng: Random) -> Any:
    """A step of the first or a later number, of one kind or of several; it counts as valid for sequences that have
    come so far."""
    count = len(handles)
    kinds = [rng.choice((pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_VERIFY)) for _ in handles]
    lengths = [1 if kind == pb.ROW_KIND_DECODE else rng.choice((1, 2, 3)) for kind in kinds]
    done = rng.choice((0, 0, 1, 2))
    offsets = np.cumsum([0, *lengths])
    request = pb.StepRequest(
        server_epoch=held.epoch,
        sequence=handles,
        kind=kinds,
        step=[done + 1] * count,
        position=[rng.choice((done, 2 * done))] * count,
        accepted=rng.choice(([], [-1] * count, [1] * count)),
        query_start_loc=offsets.tolist(),
        output=rng.choice((pb.OUTPUT_ROWS_ALL, pb.OUTPUT_ROWS_LAST, pb.OUTPUT_ROWS_NONE)),
        priority=rng.choice((0, 7)),
        queue_timeout_us=rng.choice((0, 0, 1, 10**6)),
        max_reply_bytes=rng.choice((0, 0, 1 << 16, 2**64 - 1)),
    )
    shape = (int(offsets[-1]), HIDDEN)
    if rng.random() < 0.75:
        request.hidden.CopyFrom(wire.encode(np.full(shape, 1.0, np.float32)))
    else:
        request.hidden.dtype, request.hidden.shape[:] = tensor_pb2.DATA_TYPE_FLOAT32, shape
        request.hidden.shared.region, request.hidden.shared.offset = held.region, 0
    if rng.random() < 0.2:
        place = request.output_slice
        place.region, place.offset, place.size_bytes = held.region, 1 << 15, 1 << 15
    return request


def _load_messages(rng: Random) -> list[Message]:
    """The messages that upload a small adapter."""
    config, tensors = _ADAPTER
    upload = adapter_service_pb2.AdapterUpload(config=config, tensors_bytes=len(tensors))
    first = adapter_service_pb2.LoadAdapterRequest(
        name=rng.choice(_ADAPTER_NAMES), pinned=rng.random() < 0.1, upload=upload, shared=rng.random() < 0.2
    )
    pieces = [tensors[i : i + _PIECE] for i in range(0, len(tensors), _PIECE)]
    return [first, *(adapter_service_pb2.LoadAdapterRequest(chunk=piece) for piece in pieces)]


def _adapter() -> tuple[bytes, bytes]:
    """The two files of an adapter of the small model."""
    shape, generator_state = ModelConfig.from_mapping(GATED_DELTA_NET), torch.get_rng_state()
    torch.manual_seed(1)
    tensors = adapter_tensors(base_weights(shape), modules(shape)[-1:], rank=1)
    torch.set_rng_state(generator_state)
    return json.dumps(adapter_config(r=1)).encode(), save(tensors)


_ADAPTER = _adapter()
