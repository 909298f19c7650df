"""What a server over ranks takes of a host's memory is that of the ranks which are there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from rigs.ranked_layers import MODELS

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config
from deltaline_server.ranks.place import Place
from deltaline_server.sizing import __main__ as sizing
from deltaline_server.sizing import host
from deltaline_server.sizing.host import check_host
from deltaline_server.sizing.sizes import size


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(next(iter(MODELS.values()))))
    return str(path)


def rank_0(world_size: int, local_size: int) -> Place:
    return Place(0, world_size, 0, local_size, "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("asked", "place", "ranks"),
    [(4, None, 4), (4, rank_0(4, 2), 2), (1, rank_0(4, 4), 4), (1, rank_0(4, 1), 1), (1, None, 1)],
    ids=["launched", "two hosts", "torchrun", "a host each", "alone"],
)
def test_ranks_of_this_host_are_counted(
    asked: int, place: Place | None, ranks: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(random_init=model, device="cpu", tensor_parallel=asked)
    each = size(config, None, place).total_bytes
    monkeypatch.setattr(host, "host_bytes", lambda: ranks * each)
    check_host(config, place)
    monkeypatch.setattr(host, "host_bytes", lambda: ranks * each - 1)
    with pytest.raises(ModelError, match=rf"expected at most {ranks * each - 1} bytes, .* got {ranks * each}: "):
        check_host(config, place)


def test_of_a_host_of_several_the_gpus_here_are_for_the_ranks_here(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = Config(random_init=model, tensor_parallel=4)
    check_host(config, rank_0(4, 2))
    with pytest.raises(ModelError, match="--tensor-parallel: expected at most 2, the GPUs of this host, got 4"):
        check_host(config)


def test_the_command_counts_all_ranks(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    each = size(Config(random_init=model, device="cpu", tensor_parallel=4), None).total_bytes
    monkeypatch.setattr(
        sys, "argv", ["deltaline size", "--random-init", model, "--device", "cpu", "--tensor-parallel", "4"]
    )
    for host_bytes, told in ((4 * each, "room"), (4 * each - 1, "too little")):
        monkeypatch.setattr(host, "host_bytes", lambda host_bytes=host_bytes: host_bytes)
        assert sizing.main() == 0
        assert f": {told} for this server on its CPU" in capsys.readouterr().out
