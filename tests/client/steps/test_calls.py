"""How many calls of the client's own functions a decode step takes: they are most of what it costs its user."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import deltaline_client
from deltaline_client import Client

ROWS, HIDDEN, STEPS = 16, 8, 20
MOST_CALLS = 68
PACKAGE = str(Path(deltaline_client.__file__).parent)


def test_a_decode_of_many_rows_takes_few_calls(server: Any) -> None:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    threading.setprofile(count)  # for the thread that reads the stream
    try:
        with Client(server.address) as client:
            sequences, hidden = client.open_many(ROWS), np.ones((ROWS, HIDDEN), np.float32)
            for _ in range(3):
                client.decode(sequences, hidden)
            time.sleep(0.05)
            calls = 0
            sys.setprofile(count)
            for _ in range(STEPS):
                client.decode(sequences, hidden)
            sys.setprofile(None)
            time.sleep(0.05)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert STEPS <= calls <= STEPS * MOST_CALLS
