"""The servers that hold a model's decoder layers, as one stack of them. Knows the client; no tokens, no torch.

A batch's sequences are a list for each server, with one sequence for each row: `sequences[server][row]`.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

from deltaline_client import Client, DeltalineError, LayerSpan, Output, Retry, Row, Sequence, StepError, TransportError

Sequences: TypeAlias = list[list[Sequence]]
Dropped: TypeAlias = SimpleQueue[Sequences | None]

ANSWER_TIMEOUT_S = 5.0
"""Until a server that gives no answer counts as absent, at the beginning and at the end."""


@dataclass(frozen=True)
class Stage:
    """A span of one of the servers; what leaves it enters the next one."""

    server: int
    span: int
    layers: LayerSpan

    def __str__(self) -> str:
        return f"{self.layers.first}:{self.layers.first + self.layers.count}"


class Servers:
    """Servers that together hold all layers of a model.

    servers: addresses, or clients for those that need more than an address; in any order. Clients made here are
    disconnected by `close`. Raises ValueError for servers that don't fit the model, with what would; Unavailable for
    one that gives no answer.
    """

    def __init__(self, servers: Iterable[str | Client], model_types: set[str], hidden: int, num_layers: int) -> None:
        if isinstance(servers, str):
            raise TypeError(f"servers: expected a list of addresses, got the string {servers!r}")
        given = list(servers)
        self._clients = [one if isinstance(one, Client) else _connect(one) for one in given]
        self._own = [client for client, one in zip(self._clients, given, strict=True) if client is not one]
        self._stages: list[Stage] = []
        for server, client in enumerate(self._clients):
            _check(client, f"servers[{server}]", model_types, hidden)
            self._stages += [Stage(server, span, layers) for span, layers in enumerate(client.info().spans)]
        self._stages.sort(key=lambda stage: stage.layers.first)
        held = [stage.layers.first + index for stage in self._stages for index in range(stage.layers.count)]
        if held != list(range(num_layers)):
            shown = ", ".join(map(str, self._stages)) or "none"
            raise ValueError(
                f"servers: expected each of the layers 0:{num_layers} once, got {shown};"
                " `deltaline-server --layers FIRST:END` serves a range"
            )
        self.max_draft_tokens: int = min(client.info().max_draft_tokens for client in self._clients)
        # A garbage collection may come inside a call of a client, so sequences that nobody has any more are closed on a
        # thread of their own; this kind of queue is made to be filled from there.
        self._dropped: Dropped = SimpleQueue()
        closing = (self._clients, self._dropped)
        closer = threading.Thread(target=_close_dropped, args=closing, name="deltaline-closer", daemon=True)
        closer.start()
        self._end = weakref.finalize(self, _end, self._dropped, closer)  # also at the process's end
        self.caches = weakref.WeakSet[Any]()

    def open(self, num_rows: int) -> Sequences:
        """Open a sequence for each row on each server, all or none."""
        opened: Sequences = []
        try:
            for client in self._clients:
                opened.append(client.open_many(num_rows))
        except BaseException:
            self.drop(opened)
            raise
        return opened

    def step(
        self,
        sequences: Sequences,
        rows: list[int],
        hidden: list[Any],
        make: Callable[[Sequence, Any], Row],
        output: Output,
    ) -> list[Any]:
        """Send tokens [n, hidden] of some rows through all layers; returns the requested outputs of each.

        Raises the first row's own error, from the StepError that has all.
        """
        for stage in self._stages:
            own = sequences[stage.server]
            batch = [make(own[row], tokens) for row, tokens in zip(rows, hidden, strict=True)]
            wanted: Output = output if stage is self._stages[-1] else "all"
            try:
                hidden = self._clients[stage.server].step(batch, output=wanted, span=stage.span).outputs
            except StepError as error:
                raise next(iter(error.errors.values())) from error
        return hidden

    def commit(self, sequences: Sequences, accepted: int) -> None:
        """Fix how many tokens of the pending verify join each sequence; it rides on the next step."""
        for stage in self._stages:
            own = sequences[stage.server]
            self._clients[stage.server].commit(own, [accepted] * len(own), span=stage.span)

    def select(self, sequences: Sequences, rows: list[int]) -> None:
        """Let row i go on from the state of rows[i]. Mutates `sequences`.

        Those of rows that are not named are closed; those of one that is named several times are forked.
        """
        uses = Counter(rows)
        for client, own in zip(self._clients, sequences, strict=True):
            left = [sequence for row, sequence in enumerate(own) if row not in uses]
            if left:
                client.close(left)
            states = {row: [own[row], *(own[row].fork(count - 1) if count > 1 else [])] for row, count in uses.items()}
            own[:] = [states[row].pop() for row in rows]

    def fork(self, sequences: Sequences) -> Sequences:
        """Open sequences that go on from the same states."""
        return [[sequence.fork()[0] for sequence in own] for own in sequences]

    def close_all(self, sequences: Sequences) -> None:
        """Close sequences on every server. Empties the list."""
        for client, own in zip(self._clients, sequences, strict=False):
            client.close(own)
        sequences.clear()

    def drop(self, sequences: Sequences) -> None:
        """Have sequences closed that nobody has any more, without waiting for it. Empties the list."""
        self._dropped.put(sequences[:])
        sequences.clear()

    def close(self) -> None:
        """Close what was dropped and what caches still have, and the connections that were made here."""
        for cache in list(self.caches):
            cache.drop()
        self._end()
        for client in self._own:
            client.disconnect()


def _close_dropped(clients: list[Client], dropped: Dropped) -> None:
    while (sequences := dropped.get()) is not None:
        for client, own in zip(clients, sequences, strict=False):
            with suppress(DeltalineError):  # their lease ends them
                client.close(own)


def _end(dropped: Dropped, closer: threading.Thread) -> None:
    dropped.put(None)
    if closer is not threading.current_thread():
        closer.join(ANSWER_TIMEOUT_S)


def _connect(address: str) -> Client:
    try:
        with Client(address, timeout=ANSWER_TIMEOUT_S, retry=Retry(max_attempts=1)) as first:
            first.info()
    except TransportError as error:
        why = f"no server answers at {address}: start one with `deltaline-server --model DIR`"
        raise type(error)(why) from error
    return Client(address)


def _check(client: Client, name: str, model_types: set[str], hidden: int) -> None:
    """Check that a server's layers are of the model. Raises ValueError."""
    info = client.info()
    if info.model_type not in model_types or info.hidden_size != hidden:
        raise ValueError(
            f"{name}: expected the checkpoint's layers, of {' or '.join(sorted(model_types))} and width {hidden}, got"
            f" {info.model_type} and {info.hidden_size}: start the server with `--model` of the same checkpoint"
        )
    if info.scope != "block":
        raise ValueError(f"{name}: expected whole layers, got their mixers: start the server with `--scope block`")
    if streams := max(max(span.input_streams, span.output_streams) for span in info.spans):
        raise ValueError(f"{name}: expected one residual stream, as transformers' models have, got {streams}")
