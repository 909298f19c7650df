"""Rows that do not run, beside rows of their request that do: these have the bits that they have when all run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.layer_calls import reason_of
from rigs.programs import state_of
from rigs.small_models import HIDDEN

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc as stubs
from deltaline_client import AsyncClient, AsyncSequence, Row
from deltaline_server.app import Server

P, D, V = pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_VERIFY
EXECUTED, REPLAYED = pb.ROW_OUTCOME_EXECUTED, pb.ROW_OUTCOME_REPLAYED

Rows = list[tuple[pb.RowKind.ValueType, int]]

# Kinds and tokens of a request's rows. The products of so many rows end in another way than those of one less.
MIXED: Rows = [(P, 70), (D, 1), (V, 3), (P, 3), (D, 1), (V, 4), (P, 17), (D, 1), (P, 100)]
DECODES: Rows = [(D, 1)] * 17


@pytest.fixture
def small_model(each_small_model: dict[str, Any]) -> dict[str, Any]:
    return each_small_model


@dataclass
class Request:
    """The second step of sequences whose first was a verify, of which 2 tokens are accepted with it."""

    handles: list[int]
    rows: Rows
    hidden: list[NDArray[np.float32]]
    step: list[int] = field(init=False)
    position: list[int] = field(init=False)
    accepted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.step, self.position, self.accepted = ([2] * len(self.rows) for _ in range(3))

    def message(self, epoch: int) -> pb.StepRequest:
        return pb.StepRequest(
            server_epoch=epoch,
            sequence=self.handles,
            kind=[kind for kind, _ in self.rows],
            step=self.step,
            position=self.position,
            accepted=self.accepted,
            query_start_loc=np.cumsum([0, *map(len, self.hidden)]).tolist(),
            hidden=wire.encode(np.concatenate(self.hidden)),
        )


def forget_handle(request: Request, row: int) -> None:
    request.handles[row] ^= 1 << 40


def skip_step(request: Request, row: int) -> None:
    request.step[row] += 1


def move_position(request: Request, row: int) -> None:
    request.position[row] += 1


def accept_too_many(request: Request, row: int) -> None:
    request.accepted[row] = 5


def spoil_hidden(request: Request, row: int) -> None:
    request.hidden[row] = np.full_like(request.hidden[row], np.nan)


FAULTS = {
    "SEQUENCE_UNKNOWN": forget_handle,
    "STEP_GAP": skip_step,
    "POSITION_MISMATCH": move_position,
    "ACCEPTED_OUT_OF_RANGE": accept_too_many,
    "NON_FINITE_INPUT": spoil_hidden,
}


async def prepare(client: AsyncClient, rows: Rows) -> tuple[list[AsyncSequence], Request]:
    """Sequences that have done their first step, and their second one; the same numbers each time."""
    rng = np.random.default_rng(8)
    sequences = await client.open_many(len(rows))
    drafts = rng.standard_normal((len(rows), 4, HIDDEN)).astype(np.float32)
    await client.step([Row.verify(s, tokens) for s, tokens in zip(sequences, drafts, strict=True)])
    hidden = [rng.standard_normal((count, HIDDEN)).astype(np.float32) for _, count in rows]
    return sequences, Request([s.handle for s in sequences], rows, hidden)


async def take(
    server: Server, stub: Any, sequences: list[AsyncSequence], request: Request
) -> tuple[list[bytes], pb.StepResponse]:
    """Each row's outputs and the state behind it, as bytes, and the reply."""
    reply: pb.StepResponse = await stub.Step(request.message(server.runtime.table.server_epoch))
    outputs, start = wire.decode(reply.hidden, limit_bytes=1 << 20), reply.output_start_loc
    found = []
    for row, sequence in enumerate(sequences):
        state = b"".join(layer.tobytes() for layer in state_of(server, sequence))
        found.append(outputs[start[row] : start[row + 1]].tobytes() + state)
    return found, reply


@pytest.mark.parametrize(
    ("rows", "fault"),
    [pytest.param(MIXED, fault, id=fault) for fault in FAULTS]
    + [pytest.param(DECODES, "SEQUENCE_UNKNOWN", id="decodes")],
)
async def test_a_refused_row_changes_no_bit_of_its_neighbours(
    make_server: Callable[..., Server], rows: Rows, fault: str
) -> None:
    """Nor has it others itself, when the request is sent again as it should have been and the others are replayed."""
    differing = []
    async with (
        make_server(chunk_tokens=256) as server,
        AsyncClient(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = stubs.LayerServiceStub(channel)
        sequences, request = await prepare(client, rows)
        expected, reply = await take(server, stub, sequences, request)
        assert list(reply.outcome) == [EXECUTED] * len(rows)
        await client.close(sequences)
        for row in range(len(rows)):
            sequences, request = await prepare(client, rows)
            sound = Request(list(request.handles), rows, list(request.hidden))
            FAULTS[fault](request, row)
            found, reply = await take(server, stub, sequences, request)
            assert [(status.row, reason_of(status.status)) for status in reply.row_status] == [(row, fault)]
            again, reply = await take(server, stub, sequences, sound)
            assert list(reply.outcome) == [EXECUTED if i == row else REPLAYED for i in range(len(rows))]
            differing += [
                (row, i) for i in range(len(rows)) if again[i] != expected[i] or (i != row and found[i] != again[i])
            ]
            await client.close(sequences)
    assert differing == []
