"""How a process loads what it computes, and how rank 0's ends when another rank is gone, whatever it waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rigs.small_models import GATED_DELTA_NET

from deltaline_server import computing
from deltaline_server.computing import Computing
from deltaline_server.config import Config

# The time that is told is 3.5 s; a busy host has more to do.
MOST_S = 20.0
# As an event loop that waits for ever, and a thread that no process outlives, wait.
WAITS = """
import threading
import time
from deltaline_server import computing
threading.Thread(target=time.sleep, args=(60,)).start()
computing._end_in_time()
print("begins", flush=True)
time.sleep(60)
"""


def test_a_process_that_waits_for_a_rank_that_is_gone_ends_by_itself() -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        begin_s = time.monotonic()
        try:
            assert process.wait(MOST_S) == 1
        finally:
            process.kill()
    assert time.monotonic() - begin_s > 2.5  # callers have been told by then


def test_products_are_full_fp32_before_kernels_are_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GATED_DELTA_NET))
    found, before = [], torch.get_float32_matmul_precision()
    monkeypatch.setattr(computing, "self_test", lambda *given: found.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    try:
        Computing.load(Config(random_init=str(tmp_path / "config.json"), device="cpu", max_sequences=1), None)
        assert (found, torch.get_float32_matmul_precision()) == (["highest"], "highest")
    finally:
        torch.set_float32_matmul_precision(before)
