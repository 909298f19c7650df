"""Front ends as processes: one that ends is started again, later and later, and one port is one server's."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltaline import link
from deltaline_server.errors import Reason
from deltaline_server.front.ends import processes
from deltaline_server.front.ends.port import SharedPort
from deltaline_server.front.ends.processes import FrontEndError, FrontEnds
from deltaline_server.front.link.connection import Served
from deltaline_server.front.link.held import Held

NOBODY: Any = SimpleNamespace(release=None, refused=lambda reason, count: None)
SERVED = Served(lambda method: None, NOBODY, Held(1 << 20), NOBODY, 1, 1 << 20, memoryview(bytearray(1 << 17)))
CRASHES = "print('serving', flush=True)"
NEVER_SERVES = "raise SystemExit(3)"
# It reads the welcome, then the end of the socket, as a front end does.
SERVES = f"""
import socket, sys
core = socket.socket(fileno=int(sys.argv[1]))
assert core.recv(100)[0] == {link.WELCOME}
print('serving', flush=True)
while core.recv(100): pass
"""
STUCK = f"{SERVES}import time; time.sleep(600)"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


class Time:
    """A clock that goes on by `life_s` whenever it is read, and waits that are noted; the last of them does not end."""

    def __init__(self, num_waits: int) -> None:
        self.waits, self.is_enough = list[float](), asyncio.Event()
        self.life_s = self._now_s = 0.0
        self._num_waits = num_waits

    def clock(self) -> float:
        self._now_s += self.life_s
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if len(self.waits) == self._num_waits:
            self.is_enough.set()
            await asyncio.Event().wait()


@pytest.fixture
async def make_front_ends() -> AsyncIterator[Callable[..., FrontEnds]]:
    made: list[FrontEnds] = []

    def make(time: Time) -> FrontEnds:
        made.append(FrontEnds(time.clock, time.sleep))
        return made[-1]

    yield make
    for front_ends in made:
        await front_ends.stop(0.0)


async def test_sockets_without_room_for_packets_end_the_start_in_words(
    make_front_ends: Callable[..., FrontEnds], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_room(connected: Any) -> None:
        raise OSError(errno.EMSGSIZE, "a socket may have too few bytes")

    monkeypatch.setattr(processes, "make_room", make_room)
    with pytest.raises(FrontEndError, match=r"ended \(a socket may have too few bytes\) before it served"):
        await make_front_ends(Time(1)).start(1, SERVED, command(SERVES))


async def test_numpy_starts_no_threads_in_one(
    make_front_ends: Callable[..., FrontEnds], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    program = f"import os, numpy; assert len(os.listdir('/proc/self/task')) == 1; {SERVES}"
    await make_front_ends(Time(1)).start(1, SERVED, command(program))


async def test_one_that_crashes_is_started_later_and_later(make_front_ends: Callable[..., FrontEnds]) -> None:
    time = Time(6)
    front_ends = make_front_ends(time)
    await front_ends.start(1, SERVED, command(CRASHES))
    await asyncio.wait_for(time.is_enough.wait(), 60)
    assert time.waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert front_ends.num_restarts == 5 and front_ends.pids == []
    assert front_ends.cpu_s > 0


async def test_one_that_does_not_start_again_is_tried_later_and_later(
    make_front_ends: Callable[..., FrontEnds], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = f"import os; os.mkdir({str(tmp_path / 'once')!r}); {CRASHES}"  # then it fails, as where its port is taken
    time = Time(4)
    front_ends = make_front_ends(time)
    with caplog.at_level(logging.WARNING):
        await front_ends.start(1, SERVED, command(once))
        await asyncio.wait_for(time.is_enough.wait(), 60)
    assert time.waits == [0.1, 0.2, 0.4, 0.8] and front_ends.num_restarts == 3
    said = [record for record in caplog.records if record.message.startswith("front end ended")]
    assert len(said) == 4


async def test_one_that_lived_long_is_started_again_soon(make_front_ends: Callable[..., FrontEnds]) -> None:
    time = Time(4)
    time.life_s = 2.5
    await make_front_ends(time).start(1, SERVED, command(CRASHES))
    await asyncio.wait_for(time.is_enough.wait(), 60)
    assert time.waits == [0.1] * 4


async def test_one_that_never_serves_ends_the_start(make_front_ends: Callable[..., FrontEnds]) -> None:
    with pytest.raises(FrontEndError, match=r"a front end ended \(3\) before it served"):
        await make_front_ends(Time(1)).start(2, SERVED, command(NEVER_SERVES))


async def test_what_can_t_be_started_ends_the_start(make_front_ends: Callable[..., FrontEnds]) -> None:
    with pytest.raises(FrontEndError, match=r"a front end ended \(No such file or directory\) before it served"):
        await make_front_ends(Time(1)).start(1, SERVED, ["/nowhere"])


async def test_the_stop_ends_them_and_kills_one_that_does_not(
    make_front_ends: Callable[..., FrontEnds], monkeypatch: pytest.MonkeyPatch
) -> None:
    for program, patience_s in ((SERVES, 60.0), (STUCK, 0.2)):
        monkeypatch.setattr(processes, "END_S", patience_s)
        front_ends = make_front_ends(Time(1))
        await front_ends.start(2, SERVED, command(program))
        assert len(front_ends.pids) == 2
        await asyncio.wait_for(front_ends.stop(0.0), 60)
        assert front_ends.pids == []


def test_a_port_is_one_server_s_until_it_gives_it_back() -> None:
    first = SharedPort("127.0.0.1", 0)
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(OSError) as caught:
            SharedPort(host, first.port)
        assert caught.value.errno == errno.EADDRINUSE
    first.close()
    SharedPort("127.0.0.1", first.port).close()


async def test_one_that_says_nothing_does_not_serve(make_front_ends: Callable[..., FrontEnds]) -> None:
    silent = SERVES.replace("print('serving', flush=True)", "import os; os.close(1)")
    with pytest.raises(FrontEndError, match="before it served"):
        await make_front_ends(Time(1)).start(1, SERVED, command(silent))


async def test_what_one_has_refused_is_counted(make_front_ends: Callable[..., FrontEnds]) -> None:
    refused, is_counted = Counter[Reason](), asyncio.Event()

    def count(reason: Reason, number: int) -> None:
        refused[reason] += number
        if reason is Reason.REPLIES_UNREAD:
            is_counted.set()

    observer: Any = SimpleNamespace(refused=count)
    says = 'print(\'{"TOO_MANY_CALLS": 2}\\n{"TOO_MANY_CALLS": 3, "REPLIES_UNREAD": 1}\', flush=True)\n'
    program = SERVES.replace("while core", f"{says}while core")
    await make_front_ends(Time(1)).start(1, replace(SERVED, observer=observer), command(program))
    await asyncio.wait_for(is_counted.wait(), 60)
    assert refused == {Reason.TOO_MANY_CALLS: 5, Reason.REPLIES_UNREAD: 1}


async def test_the_time_of_one_counts_while_it_runs_and_when_it_has_ended(
    make_front_ends: Callable[..., FrontEnds],
) -> None:
    busy = "import os\nwhile os.times().user < 0.3: pass\nwhile os.times().system < 0.2: os.stat('/')\n"
    front_ends = make_front_ends(Time(1))
    await front_ends.start(1, SERVED, command(busy + SERVES))
    while_it_runs_s = front_ends.cpu_s
    await front_ends.stop(0.0)
    assert 0.5 <= while_it_runs_s <= front_ends.cpu_s + 0.05  # the kernel counts in ticks of 10 ms
