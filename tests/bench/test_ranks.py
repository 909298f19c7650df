"""bench/ranks.py on the CPU: the models that ranks are compared by, one of them over gloo, and parts without time."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import ranks
import torch
from torch import Tensor

from deltaline_bench.model.shapes import EXPERTS_80B
from deltaline_bench.ranks.graph import Captured, captured
from deltaline_bench.ranks.models import MODELS
from deltaline_server.models.families.table import FAMILIES
from deltaline_server.models.model import ModelOptions, check_model

# Attention of the first can't be shared; the others say otherwise what the layers of one that is compared are.
NOT_COMPARED = {"olmo_hybrid", "mamba_ssm", "qwen3_5", "qwen3_5_moe", "glm5_next", "lfm2_vl"}


def run(*options: str) -> tuple[int, Sequence[str]]:
    """Exit code and lines of the bench."""
    done = subprocess.run([sys.executable, ranks.__file__, *options], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("name", [*MODELS, "large"])
def test_ranks_can_share_what_they_are_compared_by(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS.get(name, EXPERTS_80B)))
    options = ModelOptions(torch.device("cpu"), random_init=path, dtype=torch.float32)
    for rank in range(2):
        check_model(replace(options, rank=rank, world_size=2))


def test_every_family_is_compared() -> None:
    assert {config["model_type"] for config in MODELS.values()} == set(FAMILIES) - NOT_COMPARED


def test_a_family_is_compared_and_its_states_carried() -> None:
    code, lines = run("--of-part", "families", "--name", "mamba2, attention")
    assert code == 0 and len(lines) == 7, lines
    assert all(" yes " in line for line in lines[:-1])


def test_a_part_without_time_is_named_and_keeps_none_from_its_turn() -> None:
    code, lines = run("--within", "0", "--part", "orders", "--part", "sums")
    assert code == 1 and lines[-1] == "failed: orders (no time was left), sums (no time was left)"


def test_a_graph_keeps_what_its_replays_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the allocator would give to others, and unmap before it captures the next graph."""
    monkeypatch.setattr(torch, "cuda", MagicMock())
    kept: list[weakref.ref[Tensor]] = []

    def doubled() -> Captured[Tensor]:
        x = torch.ones(1)
        kept.append(weakref.ref(x))
        return captured(lambda: 2 * x)

    graph = doubled()
    [x] = kept
    assert x() is not None and float(graph.made) == 2
    del graph
    assert x() is None
