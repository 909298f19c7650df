"""Orders of rank 0 reach all others, whole and in order, and the end of either side is told."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from deltaline_server.ranks import orders as orders_module
from deltaline_server.ranks.orders import Integers, Orders

SIZES = 1024, 1, 200_000, 0, 7
WAIT_S = 30.0


class Meeting:
    """What ranks that are threads of this process share."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.num_broadcast = world_size, 0
        self._barrier = threading.Barrier(world_size, timeout=WAIT_S)
        self._given: dict[int, Tensor] = {}

    def exchange(self, rank: int, given: Tensor) -> dict[int, Tensor]:
        self._barrier.wait()
        self._given[rank] = given.clone()
        self._barrier.wait()
        return dict(self._given)


class Member:
    """A rank, as Orders sees it."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, meeting.world_size, meeting

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._meeting.exchange(self.rank, tensor)[0])
        self._meeting.num_broadcast += self.rank == 0

    def gather(self, part: Tensor) -> tuple[Tensor, ...]:
        given = self._meeting.exchange(self.rank, part)
        return tuple(given[rank] for rank in range(self.world_size))


def open_all(meeting: Meeting) -> list[Orders]:
    """Every rank's end, in their order."""
    with ThreadPoolExecutor(meeting.world_size) as pool:
        return list(pool.map(lambda rank: Orders.open(Member(rank, meeting)), range(meeting.world_size)))


def run(meeting: Meeting, do: Callable[[Orders, int], Any]) -> list[Any]:
    """Let all ranks do something by what they have opened; what each returns."""
    with ExitStack() as stack, ThreadPoolExecutor(meeting.world_size) as pool:
        orders = [stack.enter_context(closing(one)) for one in open_all(meeting)]
        return list(pool.map(do, orders, range(meeting.world_size)))


def integers(size: int) -> Integers:
    return np.random.default_rng(size).integers(-(2**31), 2**31, size, dtype=np.int32)


def all_told(orders: Orders, rank: int) -> bool:
    if rank == 0:
        for size in SIZES:
            orders.tell(integers(size))
        return True
    heard = [np.full(size, 77, dtype=np.int32) for size in SIZES]
    for one in heard:
        orders.hear(one)
    return all(np.array_equal(one, integers(len(one))) for one in heard)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_hear_what_is_told(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    meeting = Meeting(world_size)
    assert run(meeting, all_told) == [True] * world_size
    assert meeting.num_broadcast == 1, "the socket's path; all else goes by the socket"
    assert list(tmp_path.iterdir()) == [], "the socket's folder is gone"


def test_where_one_is_on_another_host_all_are_told_by_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, num_asked = socket.socket.connect, [0]

    def one_of_two(self: socket.socket, address: Any) -> None:
        num_asked[0] += 1
        if num_asked[0] == 1:
            raise FileNotFoundError
        connect(self, address)

    class Socket(socket.socket):
        connect = one_of_two

    monkeypatch.setattr(socket, "socket", Socket)
    meeting = Meeting(3)
    assert run(meeting, all_told) == [True] * 3
    assert num_asked[0] == 2 and meeting.num_broadcast == 1 + len(SIZES)


def test_where_no_socket_has_room_for_its_path_all_are_told_by_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    meeting = Meeting(2)
    assert run(meeting, all_told) == [True] * 2
    assert meeting.num_broadcast == 1 + len(SIZES) and list(folder.iterdir()) == []


def test_where_no_folder_can_be_made_all_are_told_by_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk is full, or can only be read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    meeting = Meeting(2)
    assert run(meeting, all_told) == [True] * 2
    assert meeting.num_broadcast == 1 + len(SIZES)


def test_the_end_of_either_side_is_told() -> None:
    heard = np.empty(4, dtype=np.int32)
    first, other = open_all(Meeting(2))
    first.tell(np.arange(2, dtype=np.int32))
    first.close()
    with pytest.raises(RuntimeError, match="rank 0 is gone"):
        other.hear(heard)
    other.close()
    first, other = open_all(Meeting(2))
    other.close()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        first.tell(heard)
    first.close()


def test_who_waits_naps_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, naps, sleep = list[float](), list[float](), time.sleep

    def nap(seconds: float) -> None:
        naps.append(seconds)
        sleep(seconds)

    def wait(orders: Orders, rank: int) -> None:
        if rank == 0:
            threading.Event().wait(1.0)
            orders.tell(np.ones(1, dtype=np.int32))
            return
        heard = np.zeros(1, dtype=np.int32)
        begin_s = time.thread_time()
        orders.hear(heard)
        waited.append(time.thread_time() - begin_s)
        assert heard[0] == 1

    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr(orders_module, "NAPPING_S", 0.4)  # one that is over before it looked again would show nothing
    run(Meeting(2), wait)
    assert waited[0] < 0.5
    assert naps and sum(naps) <= 0.4
