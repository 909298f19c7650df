"""Sequences that are moved: a client goes on where they live, as far as it may go there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._exceptions import DeltalineError, StateElsewhere
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._table import Home
from deltaline_client._transport.flow import Flow, MayGo, Server

Homes: TypeAlias = dict[SequenceRecord, Home]
"""Sequences that one server process holds, and where each lived as this was made."""


def by_server(sequences: Sequence[SequenceRecord], most: int) -> Iterator[tuple[Server, Homes]]:
    """Sequences by the server that holds them, so many at a time."""
    homes = {sequence: sequence._home for sequence in sequences}
    for server in dict.fromkeys(home.at for home in homes.values()):
        held = [item for item in homes.items() if item[1].at == server]
        for first in range(0, len(held), most):
            yield server, dict(held[first : first + most])


def followed(sequence: SequenceRecord, home: Home, error: DeltalineError) -> Flow[bool]:
    """A call about a sequence that lived at home failed: if it was moved and calls may go to its owner, they do so from
    now on. Gives whether the same call is to be made again, where the sequence lives now."""
    if not isinstance(error, StateElsewhere) or not error.server:
        return False
    owner = Server(error.server_epoch, error.server)
    may_go: bool = yield MayGo(owner)
    if may_go:
        sequence._table.move(sequence._slot, home, Home(owner, error.handle))
    return may_go


def elsewhere(moved: layers.MovedSequence) -> StateElsewhere:
    """What a reply tells of a sequence that was moved, as the error that tells the same."""
    numbers = {"server_epoch": str(moved.server_epoch), "sequence": str(moved.sequence)}
    return StateElsewhere("the sequence was moved to another server", metadata={"server": moved.server} | numbers)
