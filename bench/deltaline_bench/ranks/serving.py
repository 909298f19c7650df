"""Servers over ranks as their users meet them: what they answer beside a server of one process, and how they end when a
rank is killed under load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_bench.ranks.families import HIDDEN, MODELS
from deltaline_client import Client, DeltalineError

KILLS, END_S, MAX_ERROR = 5, 10.0, 1e-4
OPTIONS = ("--dtype", "float32", "--max-sequences", "8", "--batch-rows", "4", "--chunk-tokens", "256")


def measure(world_size: int) -> int:
    """Serve and kill; how many checks failed."""
    num_wrong = 0
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODELS["delta rule, attention"]))
        begin_s = time.monotonic()
        with _served(config, 1) as (_, address):
            alone = _use(address)
        with _served(config, world_size) as (server, address):
            together = _use(address)
            error = float(np.abs(together - alone).max() / np.abs(alone).max())
            num_wrong += _tell("answers as one GPU does", error < MAX_ERROR, f"relative error {error:.1e}")
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
            num_wrong += _tell("ends with 0 after SIGTERM", code == 0, f"code {code}")
        _tell("both took", True, f"{time.monotonic() - begin_s:.0f} s")
        for turn in range(KILLS):
            num_wrong += _kill(config, world_size, turn % world_size)
    return num_wrong


def _kill(config: Path, world_size: int, rank: int) -> int:
    with _served(config, world_size) as (server, address):
        ranks = _children(server.pid)
        answers: list[str] = []
        calling = threading.Thread(target=_load, args=(address, answers))
        calling.start()
        time.sleep(1.0)
        os.kill(ranks[rank], signal.SIGKILL)
        begin_s = time.monotonic()
        try:
            code: int | None = server.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
        took_s = time.monotonic() - begin_s
        calling.join()
        left = [pid for pid in ranks if _is_alive(pid)]
        note = f"{took_s:.1f} s, code {code}, left {left}, its caller: {answers}"
        return _tell(f"all end when rank {rank} is killed", code is not None and not left, note)


def _tell(what: str, holds: bool, note: str) -> int:
    print(f"  {'server':10} {what:58} {'yes' if holds else 'NO':>14}  {note}", flush=True)
    return int(not holds)


@contextmanager
def _served(config: Path, world_size: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its address."""
    command = [sys.executable, "-m", "deltaline_server", "--random-init", str(config), "--log-format", "json"]
    ports = ("--port", "0", "--metrics-port", "-1", "--link", "off", "--tensor-parallel", str(world_size))
    with subprocess.Popen([*command, *ports, *OPTIONS], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said: dict[str, Any] = {}
            lines = []
            for line in server.stderr:
                lines.append(line)
                said = json.loads(line) if line.startswith("{") else {}
                if said.get("message") == "ready":
                    break
            if said.get("message") != "ready":
                raise RuntimeError("no server: " + "".join(lines)[-2000:])
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield server, said["address"]
        finally:
            server.kill()


def _use(address: str) -> NDArray[np.float32]:
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


def _load(address: str, answers: list[str]) -> None:
    token = np.ones((1, HIDDEN), dtype=np.float32)
    try:
        with Client(address, timeout=3.0) as client, client.open() as sequence:
            while True:
                sequence.decode(token)
    except DeltalineError as error:
        answers.append(type(error).__name__)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(map(int, found))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
