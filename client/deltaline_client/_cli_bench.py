"""`deltaline bench`: clients that step in a closed loop, and the percentiles of what their steps took."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Literal, Self

import numpy as np

from deltaline_client._cli_text import ProgressLine, table
from deltaline_client._client import Client
from deltaline_client._exceptions import DeltalineError
from deltaline_client._rows import Row
from deltaline_client._sequence import SequenceRecord
from deltaline_client._types import ServerInfo, StepTiming

Kind = Literal["prefill", "decode", "verify", "mixed"]

_STAGES = ("total", "queue", "copy in", "compute", "copy out", "transport")
_PERCENTILES = (50, 90, 99)
_MIXED_PREFILL_TOKENS = 16


@dataclass(frozen=True)
class BenchOptions:
    """Sizes of a run: clients at once, sequences of each, steps of a kind, tokens of a prefill and of a verify row.

    timeout: seconds for a step with all its retries.
    """

    clients: int = 4
    rows: int = 8
    steps: int = 100
    prefill: int = 128
    drafts: int = 4
    timeout: int = 10

    def __post_init__(self) -> None:
        for size in fields(self):
            least = 0 if size.name == "drafts" else 1
            if getattr(self, size.name) < least:
                raise ValueError(f"--{size.name}: expected {least} or more, got {getattr(self, size.name)}")

    def check(self, info: ServerInfo) -> None:
        """Raise ValueError if the server can't take a run of these sizes."""
        if self.drafts > info.max_draft_tokens:
            raise ValueError(f"--drafts: the server verifies at most {info.max_draft_tokens} tokens, got {self.drafts}")
        if self.rows * self.clients > info.max_sequences:
            raise ValueError(
                f"--rows: the server holds at most {info.max_sequences} sequences, "
                f"got {self.rows} for each of {self.clients} clients"
            )


@dataclass(frozen=True)
class Phase:
    """Steps of one kind, by all clients. stages_s: [steps, stages] in the order of _STAGES."""

    kind: Kind
    num_tokens: int
    took_s: float
    stages_s: list[tuple[float, ...]]


class LoopingClient:
    """One client with its sequences, which sends its next step when the last is answered.

    Between steps it looks at `stop`. As a context manager it closes its sequences.
    """

    def __init__(self, client: Client, options: BenchOptions, seed: int, stop: threading.Event) -> None:
        info = client.info()
        options.check(info)
        self._client = client
        self._hidden_size = info.hidden_size
        self._options = options
        self._drafts = options.drafts
        self._stop = stop
        self._rng = np.random.default_rng(seed)
        self.sequences = client.open_many(options.rows)

    def run(self, kind: Kind, steps: int, progress: ProgressLine) -> list[tuple[float, ...]]:
        """Step all sequences `steps` times, or until the stop, and return where the time of each step went."""
        stages_s = []
        for _ in range(steps):
            if self._stop.is_set():
                break
            rows = [self._row(kind, index, sequence) for index, sequence in enumerate(self.sequences)]
            begin_s = time.perf_counter()
            result = self._client.step(rows)
            stages_s.append(_stages(time.perf_counter() - begin_s, result.timing))
            for row in result.rows:
                pending = row.sequence.progress().pending_tokens
                if pending:
                    self._client.commit([row.sequence], [int(self._rng.integers(0, pending + 1))])
            progress.advance()
        return stages_s

    def num_tokens(self, kind: Kind, index: int) -> int:
        """Tokens of the row of a client's index-th sequence."""
        if kind == "mixed":
            kind = ("prefill", "decode", "verify")[index % 3] if self._drafts else "decode"
            return {"prefill": _MIXED_PREFILL_TOKENS, "decode": 1, "verify": self._drafts}[kind]
        return {"prefill": self._options.prefill, "decode": 1, "verify": self._drafts}[kind]

    def _row(self, kind: Kind, index: int, sequence: SequenceRecord) -> Row:
        tokens = self.num_tokens(kind, index)
        hidden = self._rng.standard_normal((tokens, self._hidden_size), dtype=np.float32)
        if kind == "mixed":
            make = (Row.prefill, Row.decode, Row.verify)[index % 3] if self._drafts else Row.decode
        else:
            make = {"prefill": Row.prefill, "decode": Row.decode, "verify": Row.verify}[kind]
        return make(sequence, hidden)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, DeltalineError):  # after such an error the server may be gone
            self._client.close(self.sequences)


def _stages(total_s: float, timing: StepTiming) -> tuple[float, ...]:
    server_s = (timing.queue_s, timing.copy_in_s, timing.compute_s, timing.copy_out_s)
    rest_s = total_s - sum(server_s)
    return (total_s, *server_s, rest_s if rest_s > 0 else math.nan)


def run_phases(address: str, options: BenchOptions, plan: Rows[tuple[Kind, int]]) -> list[Phase]:
    """Run kinds of steps one after the other, each by all clients at once.

    However it ends, the clients stop after the step that they are at, and close what they opened.
    """
    phases, stop = [], threading.Event()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(address, timeout=options.timeout)) for _ in range(options.clients)]
        loops = [stack.enter_context(LoopingClient(client, options, seed, stop)) for seed, client in enumerate(clients)]
        threads = stack.enter_context(ThreadPoolExecutor(options.clients))
        stack.callback(stop.set)
        for kind, steps in plan:
            with ProgressLine(f"{kind} steps", steps * options.clients) as progress:
                begin_s = time.perf_counter()
                runs = [threads.submit(loop.run, kind, steps, progress) for loop in loops]
                stages_s = [stages for run in runs for stages in run.result()]
                took_s = time.perf_counter() - begin_s
            tokens = sum(loop.num_tokens(kind, index) for loop in loops for index in range(options.rows))
            phases.append(Phase(kind, tokens * steps, took_s, stages_s))
    return phases


def bench(address: str, options: BenchOptions) -> int:
    """Measure a server and print what came of it."""
    plan: list[tuple[Kind, int]] = [("prefill", 1), ("decode", options.steps)]
    if options.drafts:
        plan.append(("verify", options.steps))
    print_phases(run_phases(address, options, plan))
    return 0


def print_phases(phases: Rows[Phase]) -> None:
    """Print the speed of each kind of step, and percentiles of its stages in milliseconds."""
    speeds = [("", "steps", "steps/s", "tokens/s")]
    percentiles = [("ms", "stage", *(f"p{percentile}" for percentile in _PERCENTILES))]
    for phase in phases:
        steps = len(phase.stages_s)
        speeds.append((phase.kind, str(steps), f"{steps / phase.took_s:.1f}", f"{phase.num_tokens / phase.took_s:.0f}"))
        for stage, seconds in zip(_STAGES, np.asarray(phase.stages_s).T, strict=True):
            known_ms = seconds[np.isfinite(seconds)] * 1e3
            values = [f"{np.percentile(known_ms, p):.3f}" if len(known_ms) else "-" for p in _PERCENTILES]
            percentiles.append((phase.kind if stage == "total" else "", stage, *values))
    print(table(speeds, align="<>>>"))
    print()
    print(table(percentiles, align="<<>>>"))
