"""Servers with names, as they stand behind one address, and what a client does with a sequence there."""

from __future__ import annotations

from typing import Any

import numpy as np
from rigs.linked import Driven, tokens

from deltaline_client import SequenceState
from deltaline_server.app import Server


class Servers:
    """Servers that serve. names: theirs."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers
        self.names = [server.identity.name for server in servers]
        self.addresses = [server.address for server in servers]

    @property
    def num_open(self) -> list[int]:
        """How many sequences each has."""
        return [server.runtime.table.num_open for server in self.servers]


def run_round(driven: Driven, client: Any) -> Any:
    """Open, prefill, verify, commit, decode, close: the outputs, and what the sequence is then."""
    do = driven.do
    sequence = do(client.open())
    outputs = [do(sequence.prefill(tokens(5, 1))), do(sequence.verify(tokens(3, 2)))]
    do(sequence.commit(2, now=True))
    outputs.append(do(sequence.decode(tokens(1, 3))))
    assert sequence.position == 8
    assert do(client.close([sequence])) == [SequenceState.CLOSED]
    return np.concatenate(outputs)
