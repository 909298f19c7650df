"""How a process loads what it computes, and how rank 0's ends when another rank is gone, whatever it waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rigs.ranked_layers import MODELS

from deltaline_server import computing
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import Computing
from deltaline_server.config import Config
from deltaline_server.ranks.group import LostRankError
from deltaline_server.ranks.place import Place

# The time that is told is 3.5 s; a busy host has more to do.
MOST_S = 20.0
# As an event loop that waits for ever, and a thread that no process outlives, wait.
WAITS = """
import threading
import time
from deltaline_server import computing
threading.Thread(target=time.sleep, args=(60,)).start()
print(time.monotonic(), flush=True)
computing._end_in_time()
time.sleep(60)
"""


def test_a_process_that_waits_for_a_rank_that_is_gone_ends_by_itself() -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begin_s = float(process.stdout.readline())
        try:
            assert process.wait(MOST_S) == 1
        finally:
            process.kill()
    assert time.monotonic() - begin_s > 2.5  # callers have been told by then


class Group:
    """This process among two, of which the other one hears what it says; whether rank 0 is there to be told."""

    ranks, said, is_there = None, list[str](), True

    def __init__(self, *given: object) -> None:
        self.said.clear()

    def fail(self, why: str) -> None:
        if not self.is_there:
            raise LostRankError
        self.said.append(why)


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    ("error", "told"),
    [(ModelError("--layers: none"), "--layers: none"), (MemoryError("a\nb"), "it failed to load (MemoryError)")],
)
def test_a_rank_that_fails_to_load_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str, is_there: bool
) -> None:
    """Else they wait for hours. Its own error is raised, whoever hears of it."""

    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(Group, "is_there", is_there)
    monkeypatch.setattr(computing, "Group", Group)
    monkeypatch.setattr(computing, "load_model", fail)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gated-delta-net"]))
    place = Place(1, 2, 1, 2, "127.0.0.1", 1)
    with pytest.raises(type(error)) as raised:
        Computing.load(Config(random_init=str(tmp_path / "config.json"), device="cpu"), place)
    assert raised.value is error and Group.said == [told] * is_there


def test_products_are_full_fp32_before_kernels_are_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gated-delta-net"]))
    found, before = [], torch.get_float32_matmul_precision()
    monkeypatch.setattr(computing, "self_test", lambda *given: found.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    try:
        Computing.load(Config(random_init=str(tmp_path / "config.json"), device="cpu", max_sequences=1), None)
        assert (found, torch.get_float32_matmul_precision()) == (["highest"], "highest")
    finally:
        torch.set_float32_matmul_precision(before)


def test_ranks_agree_on_the_ends_of_streams(tmp_path: Path) -> None:
    """What a state may go on with is the same, but not the width of what a rank gets."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["streams"]))
    config = Config(random_init=str(tmp_path / "config.json"), device="cpu", max_sequences=1)
    one, other = (Computing.load(replace(config, stream_ends=ends), None).identity() for ends in ("none", "expand"))
    assert one.items() ^ other.items() == {("ends of streams", "none"), ("ends of streams", "expand")}
