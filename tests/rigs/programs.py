"""Programs: what a sequence is put through in a test, drawn from a seed, and its run on a server or alone on a
model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_client import AsyncClient, AsyncSequence, Row
from deltaline_kernels import Rows
from deltaline_server.app import Server
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.models.model import Model

Array = NDArray[Any]
Kind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class Step:
    """One step: its tokens, and for a verify how many of them are accepted afterwards."""

    kind: Kind
    hidden: Array
    accepted: int


@dataclass(frozen=True)
class Program:
    """Steps of one sequence in order."""

    steps: list[Step]

    @classmethod
    def draw(
        cls,
        seed: int,
        num_steps: int,
        hidden_size: int,
        *,
        max_draft: int = 4,
        lengths: tuple[int, ...] = (1, 2, 17, 70),
    ) -> Program:
        rng = np.random.default_rng(seed)
        steps = []
        for _ in range(num_steps):
            kind: Kind = rng.choice(["prefill", "decode", "decode", "verify", "verify"])
            length = {"prefill": int(rng.choice(lengths)), "decode": 1, "verify": int(rng.integers(1, max_draft + 1))}[
                kind
            ]
            hidden = rng.standard_normal((length, hidden_size)).astype(np.float32)
            steps.append(Step(kind, hidden, int(rng.integers(0, length + 1)) if kind == "verify" else 0))
        return cls(steps)


async def run_together(
    client: AsyncClient, sequences: list[AsyncSequence], programs: list[Program]
) -> list[list[Array]]:
    """Run programs side by side, step i of each in one request until it ends; outputs by program and step."""
    outputs: list[list[Array]] = [[] for _ in programs]
    for i in range(max(len(program.steps) for program in programs)):
        live = [p for p, program in enumerate(programs) if i < len(program.steps)]
        rows = [getattr(Row, programs[p].steps[i].kind)(sequences[p], programs[p].steps[i].hidden) for p in live]
        results = await client.step(rows)
        for p, output in zip(live, results.outputs, strict=True):
            outputs[p].append(output)
            if programs[p].steps[i].kind == "verify":
                await sequences[p].commit(programs[p].steps[i].accepted)
    return outputs


class Alone:
    """Runs programs on a model, each as the only sequence there is: no server, no batch, no line that was used
    before. state: the recurrent state by layer after the latest run."""

    def __init__(self, model: Model, max_draft: int) -> None:
        self._model, self._max_draft = model, max_draft
        self.state: list[Array] = []

    def run(self, program: Program, adapter_slot: int = -1) -> list[Array]:
        """Outputs by step, under the adapter in a slot of the model's."""
        adapters = (
            None if adapter_slot < 0 else torch.tensor([adapter_slot], dtype=torch.int32, device=self._model.device)
        )
        pool = self._model.make_pool(StateOptions(num_lines=1, max_draft=self._max_draft))
        if pool.page_table is not None:
            pool.page_table[1] = torch.arange(1, pool.page_table.shape[1] + 1)
        outputs, read_line, replay, half, position = [], 0, 0, 0, 0
        with torch.inference_mode():
            for step in program.steps:
                length = len(step.hidden)
                rows = Rows.build(
                    [length],
                    [read_line],
                    [1],
                    [0 if step.kind == "verify" else length],
                    [replay],
                    [half],
                    max_short=self._max_draft,
                    device=self._model.device,
                    position=[position],
                )
                hidden = torch.from_numpy(step.hidden).to(self._model.device)
                outputs.append(self._model.forward(0, hidden, rows, pool, adapters).cpu().numpy())
                read_line, replay, position = 1, 0, position + length
                if step.kind == "verify":
                    replay, half, position = step.accepted, 1 - half, position - length + step.accepted
        self.state = _state_in_line(pool, 1)
        return outputs


def state_of(server: Server, sequence: AsyncSequence) -> list[Array]:
    """The recurrent state of a sequence by layer; what a committed verify adds to it is there after the next step."""
    table = server.runtime.table
    slots, _ = table.lookup(table.server_epoch, np.array([sequence.handle], dtype=np.uint64))
    return _state_in_line(server.runtime.pool, int(table.write_line[slots[0]]))


def _state_in_line(pool: StatePool, line: int) -> list[Array]:
    recurrent = [layer.recurrent[line] for layer in pool.layers if isinstance(layer, LayerState)]
    return [state.float().cpu().numpy() for state in recurrent]


def states_differ_by(actual: list[Array], expected: list[Array]) -> float:
    """The largest relative error of a layer's state."""
    return max(relative_error(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


def relative_error(actual: Array, expected: Array) -> float:
    """Norm of the difference over the norm of what is expected; infinite when a value is not finite."""
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), 1e-30))
