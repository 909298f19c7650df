"""How many calls of our own functions a decode step takes: they are what the service costs besides its layers.

A number here grows only with a decision (docs/adr) that says what is had for it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.served import served

import deltaline_client
import deltaline_kernels
import deltaline_server
from deltaline import wire
from deltaline.v1.layer_service_pb2 import ROW_KIND_DECODE
from deltaline_client import Client, Row, Sequence
from deltaline_server.app import Server

# Three of the server's by gRPC are its histograms, for some forty of prometheus that nobody counted here.
MOST = {
    "grpc": {"server": 167, "client": 58, "kernels": 175, "wire": 14},
    "link": {"server": 179, "client": 73, "kernels": 175, "wire": 14},
}
ROWS, WARM_UP, STEPS = 16, 10, 100
PACKAGES = {"server": deltaline_server, "client": deltaline_client, "kernels": deltaline_kernels}


class CallCounter:
    """Counts the calls of our functions in threads that begin while it is installed, and in the one that installs it.

    A generator or coroutine counts each time it goes on; what runs in C does not count.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_on = False
        folders = {str(Path(str(package.__file__)).parent) + "/": name for name, package in PACKAGES.items()}
        self._folders = folders | {str(wire.__file__): "wire"}
        self._part_of: dict[str, str | None] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self._noted)
        sys.setprofile(self._noted)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    def _noted(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call":
            file = frame.f_code.co_filename
            if file not in self._part_of:
                found = [name for folder, name in self._folders.items() if file.startswith(folder)]
                self._part_of[file] = found[0] if found else None
            part = self._part_of[file]
            if part is not None:
                self.calls[part] += 1


def decode(client: Client, sequences: list[Sequence], hidden: NDArray[np.float32]) -> object:
    return client.decode(sequences, hidden)


def step(client: Client, sequences: list[Sequence], hidden: NDArray[np.float32]) -> object:
    # As few calls as can be: who makes Row.decode makes one more for each row.
    return client.step([Row(*row) for row in zip(sequences, repeat(ROW_KIND_DECODE), hidden, strict=False)])


def calls_of(
    server: Server, rows: int, make_step: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """How many calls of each package a step of so many decode rows takes."""
    for tick in ("LEASE_TICK_S", "WATCH_TICK_S"):  # else slow steps would count what goes on beside them
        monkeypatch.setattr(f"deltaline_server.app.{tick}", 3600.0)
    counter = CallCounter()
    hidden = np.random.default_rng(0).standard_normal((rows, 64), dtype=np.float32)
    with counter.installed(), served(server) as address, Client(address) as client:
        assert client.info().is_linked == (server.config.link != "off")
        sequences = client.open_many(rows)
        for number in range(WARM_UP + STEPS):
            counter.is_on = number >= WARM_UP
            make_step(client, sequences, hidden)
    calls = {part: counter.calls[part] // STEPS for part in (*PACKAGES, "wire")}
    assert all(calls.values()), "nothing was counted"
    return calls


@pytest.mark.parametrize("way", MOST)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_decode_takes_few_calls(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    link = str(tmp_path / "run" / "link.sock") if way == "link" else "off"
    calls = calls_of(make_server(link=link), ROWS, decode, monkeypatch)
    assert {part: count for part, count in calls.items() if count > MOST[way][part]} == {}


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("make_step", [decode, step])
def test_more_rows_take_no_more_calls_of_the_client(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, make_step: Callable[..., object]
) -> None:
    few, many = (calls_of(make_server(link="off"), rows, make_step, monkeypatch)["client"] for rows in (ROWS, 3 * ROWS))
    # A number on the wire may take a byte more than what is read at once.
    assert many <= few + 2
