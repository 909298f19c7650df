"""Starts the processes of a server over ranks on this host, as torchrun does, and ends them together.

The ranks meet at a store of rank 0's that listens on loopback. Signals are rank 0's alone; when one rank has ended the
others have a while to do so too, and are killed then.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from deltaline_server.log import event
from deltaline_server.ranks.place import Place

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# For rank 0 when another rank has ended, or has failed, of which it tells its callers; and for the others when it has.
END_S, FAILED_S, LAST_S = 8.0, 4.0, 2.0
# What else gloo and NCCL would ask the network for; and memory that ranks share needs no multicast.
_USUAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def launch(world_size: int, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command in so many processes, each told its place, until all have ended; the exit code of the first that
    did, of rank 0 where that is 0.

    SIGTERM and SIGINT are passed on to rank 0. All are killed when this process is.
    """
    shared = _USUAL | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size))} | dict(environ)
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen(world_size)
        port = listening.getsockname()[1]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                fd = listening.fileno() if rank == 0 else None
                place = Place(rank, world_size, rank, world_size, LOOPBACK, port, fd)
                ranks.append(_start(command, shared | place.variables(), fd))
                if rank == 0:
                    _pass_signals_to(ranks[0])
        except BaseException:
            _kill(ranks)
            raise
    return _end_together(ranks)


def _start(command: Sequence[str], environ: Mapping[str, str], fd: int | None) -> subprocess.Popen[bytes]:
    """Start a rank, in a session of its own: a terminal's signals come to this process alone."""
    fds = () if fd is None else (fd,)
    return subprocess.Popen(command, env=environ, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)


def _pass_signals_to(process: subprocess.Popen[bytes]) -> None:
    def send(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, send)


def _end_together(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the first end, and see to it that the others follow; the exit code."""
    while (first := next((one for one in ranks if one.poll() is not None), None)) is None:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid not in {one.pid for one in ranks}:
            os.waitpid(ended.si_pid, 0)  # of a container whose first process this is: it would be found for ever
    code = first.returncode
    if code < 0:
        event(_log, "a rank was killed", level=logging.ERROR, rank=ranks.index(first), signal=-code)
    with suppress(subprocess.TimeoutExpired):
        ranks[0].wait(FAILED_S if code else END_S)
        last_s = time.monotonic() + LAST_S
        for one in ranks[1:]:
            one.wait(max(0.0, last_s - time.monotonic()))
    # The others end when rank 0 says so, also where that has failed.
    code = code or ranks[0].poll() or 0
    _kill(ranks)
    return code if code >= 0 else 128 - code


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in ranks:
        one.kill()
    for one in ranks:
        one.wait()
