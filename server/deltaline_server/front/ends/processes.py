"""The front ends of a server, from its side: started, watched, and started again when they end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import socket
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from deltaline.link_socket import make_room
from deltaline_server.errors import Reason
from deltaline_server.front.ends.memory import link_bytes
from deltaline_server.front.ends.port import SharedPort
from deltaline_server.front.link.connection import Connection, Served
from deltaline_server.front.trust.peer import Peer
from deltaline_server.log import event
from deltaline_server.memory.regions import Regions
from deltaline_server.scheduling.observer import Observer

# How long to wait before a front end that ended is started again; doubled each time, up to the most, unless the last
# one lived so long.
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 1.0
STEADY_S = 2.0
# How long a front end may take to end once its connection is over.
END_S = 5.0
# They do no linear algebra. numpy's would start a thread for each processor at once, 41 MB each: on 32 of them more
# than the memory that a front end may take.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}

_log = logging.getLogger(__name__)


class FrontEndError(RuntimeError):
    """A front end ended before it served."""


class FrontEnds:
    """Processes that speak gRPC, with a connection of the link each. They belong to the event loop.

    num_restarts: how often one that ended was started again.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """clock: monotonic seconds. sleep: waits so many."""
        self._clock, self._sleep = clock, sleep
        self._port: SharedPort | None = None
        self._regions: Regions | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: set[Connection] = set()
        self._stopping = asyncio.Event()
        # Of those connections, the ones whose front end takes calls, and its process.
        self._serving: dict[Connection, int] = {}
        # All that are not over, as the kernel counts their time; that of children before them.
        self._running: set[int] = set()
        self._others_s = 0.0
        self.num_restarts = 0

    @property
    def pids(self) -> list[int]:
        """The processes that serve now."""
        return list(self._serving.values())

    @property
    def num_calls(self) -> int:
        """Calls that came through them and are not over."""
        return sum(len(connection.tasks) for connection in list(self._serving))

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that they took, those that ended included."""
        num_ticks = 0
        for pid in list(self._running):
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                num_ticks += int(fields[11]) + int(fields[12])
        return _ended_s() - self._others_s + num_ticks / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes(self) -> int:
        """Host memory of those that serve now, what they share with this process included."""
        num_pages = 0
        for pid in self.pids:
            with suppress(OSError):
                num_pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")

    def take_port(self, host: str, port: int) -> int:
        """Keep the port that they will listen on, 0 for any; return it. Raises OSError."""
        self._port = SharedPort(host, port)
        return self._port.port

    async def start(self, count: int, served: Served, command: Sequence[str]) -> None:
        """Start so many; return once they serve. served: of the link; they get memory of their own. command: what
        starts one; it gets the number of its socket behind it. Raises FrontEndError when one ends before it serves."""
        self._regions = Regions(
            limit_bytes=count * link_bytes(served.message_bytes),
            # Its end is that of its connection.
            default_lease_s=math.inf,
            max_lease_s=math.inf,
            clock=self._clock,
        )
        self._others_s = _ended_s()
        served, loop = replace(served, regions=self._regions), asyncio.get_running_loop()
        firsts: list[asyncio.Future[None]] = [loop.create_future() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._keep(served, command, first)) for first in firsts]
        await asyncio.gather(*firsts)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give those in flight so many seconds, and end all. Idempotent."""
        self._stopping.set()
        for connection in self._connections:
            connection.stop()
        calls = [call for connection in self._serving for call in connection.tasks]
        if calls:
            await asyncio.wait(calls, timeout=grace_s)
        for connection in list(self._connections):
            connection.end("the server stops")
        await asyncio.gather(*self._tasks, *calls, return_exceptions=True)
        if self._regions is not None:
            await self._regions.close()
        if self._port is not None:
            self._port.close()

    async def _keep(self, served: Served, command: Sequence[str], first: asyncio.Future[None]) -> None:
        """Keep one running. first: told when it serves for the first time, or why not."""
        delay_s = FIRST_DELAY_S
        while True:
            begin_s = self._clock()
            try:
                code: object = await self._run(served, command, first)
            except OSError as error:  # no process, or no descriptor, to be had
                code = error.strerror
            if not first.done():
                first.set_exception(FrontEndError(f"a front end ended ({code}) before it served"))
                return
            lived_s = self._clock() - begin_s
            delay_s = FIRST_DELAY_S if lived_s >= STEADY_S else delay_s
            if self._stopping.is_set():
                return
            event(_log, "front end ended", level=logging.WARNING, code=code, seconds=lived_s, again_in_s=delay_s)
            if await self._stops_within(delay_s):
                return
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            self.num_restarts += 1

    async def _stops_within(self, seconds: float) -> bool:
        """Wait; whether the server stopped meanwhile."""
        sleeping, stopping = asyncio.ensure_future(self._sleep(seconds)), asyncio.create_task(self._stopping.wait())
        await asyncio.wait((sleeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        sleeping.cancel()
        stopping.cancel()
        await asyncio.gather(sleeping, stopping, return_exceptions=True)
        return self._stopping.is_set()

    async def _run(self, served: Served, command: Sequence[str], first: asyncio.Future[None]) -> int:
        """Run one until it ends, or its connection does; return its exit code. Raises OSError."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(connection: Connection) -> None:
            self._connections.discard(connection)
            self._serving.pop(connection, None)
            ended.set_result(None)

        ours, process, output = await _spawn(command)
        self._running.add(process.pid)
        connection = Connection(served, ours, Peer(f"front end {process.pid}"), end, is_front_end=True)
        self._connections.add(connection)
        connection.start()
        if self._stopping.is_set():
            connection.end("the server stops")
        exits, says = asyncio.create_task(process.wait()), asyncio.create_task(output.readline())
        await asyncio.wait((says, ended), return_when=asyncio.FIRST_COMPLETED)
        if says.done() and says.result() and not ended.done():  # it says nothing when it ended
            self._serving[connection] = process.pid
            event(_log, "front end serves", pid=process.pid)
            if not first.done():
                first.set_result(None)
            counts = asyncio.create_task(_count(output, served.observer))
            await asyncio.wait((exits, ended), return_when=asyncio.FIRST_COMPLETED)
            counts.cancel()
        connection.end("")
        if not (await asyncio.wait((exits,), timeout=END_S))[0]:
            process.kill()
        await asyncio.gather(exits, says)
        self._running.discard(process.pid)
        if says.result() and not first.done():  # it served, and ended at once
            first.set_result(None)
        return exits.result()


def _ended_s() -> float:
    """Processor time of this process's children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


async def _count(output: asyncio.StreamReader, observer: Observer) -> None:
    """Count what a front end says that it refused."""
    async for line in output:
        for name, count in json.loads(line).items():
            observer.refused(Reason[name], count)


async def _spawn(command: Sequence[str]) -> tuple[socket.socket, asyncio.subprocess.Process, asyncio.StreamReader]:
    """Start a process; our end of its socket, the process, and what it says. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            make_room(ours)
            make_room(theirs)
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                stdin=DEVNULL,
                stdout=PIPE,
                pass_fds=(theirs.fileno(),),
                env=os.environ | _NO_THREADS,
            )
    except BaseException:
        ours.close()
        raise
    assert process.stdout is not None
    ours.setblocking(False)
    return ours, process, process.stdout
