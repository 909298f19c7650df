"""States over ranks: the same bytes at any number of ranks, from which sequences go on at any other."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch
from rigs.rank_processes import run_ranks
from rigs.ranked_layers import MODELS, write_configs
from rigs.ranked_states import carry
from rigs.states import GATED_DELTA
from torch import Tensor

from deltaline_server.layers.state_pool import StatePool
from deltaline_server.models.model import Model
from deltaline_server.ranks.ways import Ranks
from deltaline_server.snapshots.device import shared_transfer
from deltaline_server.snapshots.device.shared_transfer import SharedTransfer, ShareTransfer, Told
from deltaline_server.snapshots.device.transfer import StatePlace
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayer, StateLayout, state_bytes

WAIT_S = 10.0


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    [
        ("streams", (4, 1)),
        pytest.param("streams", (2, 4, 1), marks=pytest.mark.sweep),
        pytest.param("bamba", (2, 4, 1), marks=pytest.mark.sweep),
        pytest.param("kimi", (4, 2, 1), marks=pytest.mark.sweep),
    ],
)
def test_a_state_goes_from_one_process_over_ranks_and_back_with_its_bytes(
    tmp_path: Path, name: str, world_sizes: tuple[int, ...]
) -> None:
    """Drafts to be taken in, commits, keys of fewer heads than ranks; every next step gives what one process gives."""
    config = write_configs(tmp_path, {name: MODELS[name]})[name]
    with torch.inference_mode():
        made = carry(None, config, None)
    assert made is not None
    first, outputs = made
    stored = first
    for world_size in world_sizes:
        if world_size == 1:
            with torch.inference_mode():
                carried = carry(None, config, stored)
        else:
            folder = tmp_path / str(world_size)
            folder.mkdir()
            carried, *others = run_ranks(carry, world_size, folder, config, stored)
            assert others == [None] * (world_size - 1)
        assert carried is not None
        stored, next_outputs = carried
        np.testing.assert_array_equal(stored, first)
        for ours, expected in zip(next_outputs, outputs, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))


class Way:
    """One end of a connection of ranks 0 and 1."""

    world_size = 2

    def __init__(self, sent: queue.SimpleQueue[Tensor], coming: queue.SimpleQueue[Tensor]) -> None:
        self._sent, self._coming = sent, coming

    def give(self, tensor: Tensor, rank: int) -> None:
        self._sent.put(tensor.clone())

    def take(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self._coming.get(timeout=WAIT_S))


class Connected(NamedTuple):
    """Transfers of rank 0 and of rank 1, what rank 1 is told, and what it has sent and rank 0 has not taken."""

    whole: SharedTransfer
    other: ShareTransfer
    told: queue.SimpleQueue[Told]
    answers: queue.SimpleQueue[Tensor]


def connect(layout: StateLayout) -> Connected:
    ends: tuple[queue.SimpleQueue[Tensor], queue.SimpleQueue[Tensor]] = queue.SimpleQueue(), queue.SimpleQueue()
    ways = [cast(Ranks, Way(*ends)), cast(Ranks, Way(*reversed(ends)))]
    model = cast(Model, SimpleNamespace(shapes=[layer.shape.shard(2) for layer in layout.layers]))
    pool = cast(StatePool, SimpleNamespace(device=torch.device("cpu")))
    own, other = (ShareTransfer(layout, model, (), pool, way) for way in ways)
    told: queue.SimpleQueue[Told] = queue.SimpleQueue()
    return Connected(SharedTransfer(layout, own, ways[0], told.put), other, told, ends[1])


def test_a_failure_of_rank_0_leaves_no_answers_for_the_next_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the bytes of another state, of another principal. And nobody waits for a GPU that is not the pool's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    class Transfer:
        """Of a rank: its first gather and scatter fail on rank 0; others fill a share with how many there were."""

        def __init__(self, *_: object) -> None:
            self.num_gathered = self.num_scattered = 0

        def gather(self, spans: object, place: object, commits: object, memory: Bytes) -> None:
            self.num_gathered += 1
            memory[:] = self.num_gathered
            if threading.current_thread().name != "follower" and self.num_gathered == 1:
                raise RuntimeError("no room")

        def scatter(self, *_: object) -> None:
            self.num_scattered += 1
            if threading.current_thread().name != "follower" and self.num_scattered == 1:
                raise RuntimeError("no room")

    monkeypatch.setattr(shared_transfer, "StateTransfer", Transfer)
    layout = StateLayout((StateLayer(0, 0, GATED_DELTA),), num_spans=1, itemsize=4, state_itemsize=4, max_draft=1)
    whole, other, told, answers = connect(layout)

    def follow() -> None:
        for _ in range(4):
            other.follow(told.get(timeout=WAIT_S))

    follower = threading.Thread(target=follow, name="follower")
    follower.start()
    spans, place = [SpanProgress()], StatePlace((0,), np.zeros(0, dtype=np.int32))
    memory, commits = np.zeros(state_bytes(layout.sections(spans)), dtype=np.uint8), np.zeros((0, 3), dtype=np.int64)
    with pytest.raises(RuntimeError, match="no room"):
        whole.gather(spans, place, commits, memory)
    whole.gather(spans, place, commits, memory)
    for section in layout.sections(spans):
        assert (memory[section.offset : section.offset + section.num_bytes] == 2).all()
    with pytest.raises(RuntimeError, match="no room"):
        whole.scatter(spans, place, memory)
    whole.scatter(spans, place, memory)
    follower.join(WAIT_S)
    assert answers.empty()


def test_a_scatter_ends_when_it_has_ended_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a batch that is told next reads on another rank what was there before."""
    may_end, has_begun = threading.Event(), threading.Event()

    def scatter(*_: object) -> None:
        if threading.current_thread().name == "follower":
            has_begun.set()
            assert may_end.wait(WAIT_S)

    monkeypatch.setattr(shared_transfer, "StateTransfer", lambda *_: SimpleNamespace(scatter=scatter))
    layout = StateLayout((), num_spans=1, itemsize=4, state_itemsize=4, max_draft=1)
    whole, other, told, _ = connect(layout)
    follower = threading.Thread(target=lambda: other.follow(told.get(timeout=WAIT_S)), name="follower")
    follower.start()
    state = [SpanProgress()], StatePlace((0,), np.zeros(0, dtype=np.int32)), np.zeros(0, dtype=np.uint8)
    with ThreadPoolExecutor(1) as rank_0:
        scattered = rank_0.submit(whole.scatter, *state)
        assert has_begun.wait(WAIT_S)
        with pytest.raises(TimeoutError):
            scattered.result(0.2)
        may_end.set()
        scattered.result(WAIT_S)
    follower.join(WAIT_S)
