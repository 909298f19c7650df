"""Servers over ranks as their users meet them: what they answer beside a server of one process, and how they end when a
rank is killed or stopped under load, and serve again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from deltaline_bench.ranks.figures import Figures
from deltaline_bench.ranks.models import HIDDEN, MODELS
from deltaline_bench.ranks.servers import ServerProcess, is_alive
from deltaline_cli.health import SERVICE, ask
from deltaline_client import Client, DeltalineError, Retry, StepError

KILLS, LOADED_S, MAX_ERROR = 5, 1.0, 1e-4
# Until readiness is off, and until a server that was told to end has.
UNREADY_S, END_S = 5.0, 12.0
# Until nothing is left behind a kill; of a rank that stands still that is seen after some seconds.
KILLED_END_S, STOPPED_END_S = 5.0, 20.0
# Of a state's file: where that tells how long the part is that says when it was made, and of whom.
HEADER_LENGTH = slice(12, 16)
SIZES = ("--max-sequences", "8", "--batch-rows", "4", "--chunk-tokens", "256", "--host-state-bytes", "16MiB")
OPTIONS = ("--dtype", "float32", "--drain-timeout-s", "0", *SIZES)

Values = NDArray[np.float32]


def measure(world_size: int) -> int:
    """Serve, kill and serve again; how many checks failed."""
    figures = Figures("server")
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODELS["delta rule, attention"]))
        answers = _compare(figures, config, world_size)
        ends = [*product(range(world_size), [signal.SIGKILL] * KILLS + [signal.SIGSTOP])]
        at_once = max(1, min(len(ends) // 2, (os.cpu_count() or 1) // (2 * world_size)))
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(partial(_end, figures, config, world_size, answers), ends))
        with ServerProcess(config, world_size, *OPTIONS) as server:
            again = _use(server.wait_until_ready().address)
            figures.check("serves again behind all of that", np.array_equal(again, answers), f"{server.ready_s:.0f} s")
    return figures.num_wrong


def _compare(figures: Figures, config: Path, world_size: int) -> Values:
    """A server of one process and one of ranks: their answers, and a state that goes from one to the other and back;
    what the ranks answer."""
    with ServerProcess(config, 1, *OPTIONS) as one, ServerProcess(config, world_size, *OPTIONS) as ranks:
        for server in (one, ranks):
            server.wait_until_ready()
        figures.tell("ready, one GPU and ranks at once", f"{max(one.ready_s, ranks.ready_s):.0f} s")
        alone, together = _use(one.address), _use(ranks.address)
        error = float(np.abs(together - alone).max() / np.abs(alone).max())
        figures.check("answers as one GPU does", error < MAX_ERROR, f"relative error {error:.1e}")
        states = _carry([one.address, ranks.address, one.address])
        figures.check("a snapshot goes to the ranks and back", len(set(states)) == 1, f"{len(states[0])} bytes")
        ranks.process.send_signal(signal.SIGTERM)
        code = ranks.process.wait(END_S)
        figures.check("ends with 0 after SIGTERM", code == 0, f"code {code}")
    return together


def _use(address: str) -> Values:
    source = np.random.default_rng(0)
    made = []
    with Client(address) as client, client.open() as sequence:
        made.append(sequence.prefill(source.standard_normal((100, HIDDEN), dtype=np.float32)))
        made.append(sequence.decode(source.standard_normal((1, HIDDEN), dtype=np.float32)))
        made.append(sequence.verify(source.standard_normal((4, HIDDEN), dtype=np.float32)))
        sequence.commit(2)
        children = sequence.fork(2)
        token = np.repeat(source.standard_normal((1, HIDDEN), dtype=np.float32), 3, axis=0)
        made.append(client.decode([sequence, *children], token))
        client.close(children)
    return np.concatenate(made)


def _carry(addresses: Sequence[str]) -> list[bytes]:
    """Make a snapshot at the first server and take it from each to the next one; the state's bytes at each of them."""
    states: list[bytes] = []
    for address in addresses:
        with Client(address) as client:
            if states:
                snapshot = client.snapshots.load(states[-1])
            else:
                sequence = client.open()
                sequence.prefill(np.random.default_rng(1).standard_normal((100, HIDDEN), dtype=np.float32))
                snapshot = sequence.snapshot()
            states.append(snapshot.export())
    return [state[int.from_bytes(state[HEADER_LENGTH], "little") :] for state in states]


def _end(figures: Figures, config: Path, world_size: int, answers: Values, how: tuple[int, signal.Signals]) -> None:
    """Serve, and kill or stop a rank under load."""
    rank, number = how
    with ServerProcess(config, world_size, *OPTIONS) as server:
        is_same = np.array_equal(_use(server.wait_until_ready().address), answers)
        told: list[str] = []
        calling = threading.Thread(target=_load, args=(server.address, told))
        calling.start()
        time.sleep(LOADED_S)
        begin_s = time.monotonic()
        os.kill(server.ranks[rank], number)
        while (is_ready := ask(server.address, SERVICE, 1.0) == "SERVING") and time.monotonic() - begin_s < END_S:
            time.sleep(0.05)
        unready_s = time.monotonic() - begin_s
        try:
            code: int | None = server.process.wait(KILLED_END_S if number == signal.SIGKILL else STOPPED_END_S)
        except subprocess.TimeoutExpired:
            code = None
        took_s = time.monotonic() - begin_s
        left = [pid for pid in server.ranks if is_alive(pid)]
    calling.join()
    note = f"{took_s:.1f} s, not ready after {unready_s:.1f} s, code {code}, left {left}, its caller: {told}"
    is_over = not is_ready and unready_s < UNREADY_S and code not in (None, 0) and not left
    is_told = len(told) == 1 and told[0] in ("Stopping", "Unavailable")
    figures.check(f"{number.name} of rank {rank}: served as before, all end", is_same and is_over and is_told, note)


def _load(address: str, told: list[str]) -> None:
    """Decode until that fails, and how it does."""
    try:
        with Client(address, timeout=30.0, retry=Retry(max_attempts=1)) as client:
            sequences = client.open_many(4)
            while True:
                client.decode(sequences, np.ones((4, HIDDEN), dtype=np.float32))
    except StepError as error:
        told.append(type(next(iter(error.errors.values()))).__name__)
    except DeltalineError as error:
        told.append(type(error).__name__)
