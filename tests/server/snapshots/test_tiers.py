"""The tiers that a configuration asks for, of the model that is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.small_models import HYBRID

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.config import Config
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import ModelOptions, load_model
from deltaline_server.snapshots.layout import SpanProgress, StateLayer, state_bytes
from deltaline_server.snapshots.tiers import Tiers, make_layout

OPTIONS = StateOptions(num_lines=2, max_draft=3, state_dtype=torch.bfloat16)


def open_tiers(tmp_path: Path, **options: Any) -> Tiers:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HYBRID))
    spans = (range(1, 2), range(0, 1))
    model = load_model(ModelOptions(torch.device("cpu"), random_init=path, spans=spans))
    return Tiers.open(Config(random_init=str(path), **options), model, model.make_pool(OPTIONS), None)


async def test_none_is_the_default_and_the_layout_is_the_model_s(tmp_path: Path) -> None:
    tiers = open_tiers(tmp_path)
    assert (tiers.host, tiers.files) == (None, None)
    await tiers.close()
    layout = tiers.layout
    gated, attention = layout.layers
    assert isinstance(gated.shape, GatedDeltaNetShape) and isinstance(attention.shape, AttentionShape)
    assert layout.layers == (StateLayer(0, 1, gated.shape), StateLayer(1, 0, attention.shape))
    assert (layout.num_spans, layout.itemsize, layout.state_itemsize) == (2, 4, 2)
    assert (layout.max_draft, layout.max_tokens) == (3, 4096)
    expected = 4 * 16 * 16 * 2 + 3 * (2 * 2 * 16 + 4 * 16) * 4 + 2 * 10 * 2 * 16 * 4
    assert state_bytes(layout.sections([SpanProgress(position=10)] * 2)) == expected


async def test_both_are_opened_and_given_back(tmp_path: Path) -> None:
    options = {"host_state_bytes": 1 << 20, "state_dir": str(tmp_path / "states"), "state_dir_bytes": 1 << 30}
    tiers = open_tiers(tmp_path, **options)
    assert tiers.host is not None and tiers.host.limit_bytes == 1 << 20
    assert tiers.files is not None and tiers.files.limit_bytes == 1 << 30
    with pytest.raises(ModelError, match=r"^--state-dir: expected a folder of one server, another uses it$"):
        open_tiers(tmp_path, **options)
    await tiers.close()
    await tiers.close()
    await open_tiers(tmp_path, **options).close()


def test_memory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--host-state-bytes: .* bytes can't be mapped$"):
        open_tiers(tmp_path, host_state_bytes=1 << 50)


def test_a_layout_follows_the_whole_model_not_a_rank_s_share(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HYBRID))
    layouts = []
    for world_size in (1, 2):
        model = load_model(ModelOptions(torch.device("cpu"), random_init=path, world_size=world_size))
        layouts.append(make_layout(model, model.make_pool(OPTIONS)))
    assert layouts[0] == layouts[1]
