"""Prompts' keys and waypoints end to end: what one prefill leaves, others find and go on from, by both clients."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.linked import FAST, Driven, tokens
from rigs.served import served
from rigs.small_models import GATED_DELTA_NET, HYBRID, MAMBA2

from deltaline_client import Prefix, PrefixMiss, Waypoints
from deltaline_server.app import Server

pytestmark = [pytest.mark.parametrize("device", ["cpu"]), pytest.mark.timeout(300)]

IDS = list(range(300))


@pytest.fixture
def small_model(request: pytest.FixtureRequest) -> dict[str, Any]:
    model: dict[str, Any] = getattr(request, "param", GATED_DELTA_NET)
    return model


@pytest.mark.parametrize(
    "small_model", [GATED_DELTA_NET, MAMBA2, HYBRID], indirect=True, ids=["gdn", "mamba2", "hybrid"]
)
def test_what_a_prefill_leaves_is_gone_on_from(make_server: Callable[..., Server], driven: Driven) -> None:
    do, hidden, prefix = driven.do, tokens(300), Prefix.of_tokens(IDS, at=(150,))
    with served(make_server(snapshot_lines=16)) as address:
        client = driven.make(address, retry=FAST)
        first = do(client.open(prefix=prefix))
        assert (first.position, first.match.miss) == (0, PrefixMiss.NEVER_STORED)
        places = Waypoints(tokens=(64, 150, 214), at_end=True, prefix=prefix)
        outputs = do(first.prefill(hidden, waypoints=places))
        assert [(one.position, one.skipped) for one in first.waypoints] == [(n, None) for n in (64, 150, 214, 300)]
        for keys, found in ((prefix, 150), (Prefix.of_tokens([*IDS, 7]), 64), (Prefix.of_tokens(IDS[:100]), 64)):
            assert do(client.snapshots.find(keys)).position == found
        second = do(client.open(prefix=prefix))
        assert second.match.snapshot_id == first.waypoints[1].snapshot_id
        np.testing.assert_allclose(do(second.prefill(hidden[150:])), outputs[150:], rtol=1e-4, atol=1e-4)
        by_id = do(client.open(snapshot=first.waypoints[2].snapshot_id))
        np.testing.assert_allclose(do(by_id.prefill(hidden[214:])), outputs[214:], rtol=1e-4, atol=1e-4)
        longer = Prefix.of_tokens([*IDS, 1, 2, 3], at=(300,))
        third = do(client.open(prefix=longer))
        assert third.position == 300
        rows = do(client.decode([first, second, by_id, third], np.repeat(tokens(1, 9), 4, axis=0)))
        np.testing.assert_allclose(rows, np.repeat(rows[:1], 4, axis=0), rtol=1e-4, atol=1e-4)
        do(client.disconnect())


@pytest.mark.parametrize("way", ["grpc", "link", "front end"])
def test_every_way_and_several_spans(
    make_server: Callable[..., Server], driven: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    link = str(tmp_path / "run" / "link.sock") if way == "link" else "off"
    options: dict[str, Any] = {"link": link, "front_ends": int(way == "front end"), "snapshot_lines": 8}
    do, prefix = driven.do, Prefix.of_tokens(IDS[:200])
    with served(make_server(spans="0:1,1:2", **options)) as address:
        client = driven.make(f"link:{link}" if way == "link" else address, retry=FAST)
        sequence, hidden = do(client.open()), tokens(200)
        places = Waypoints(tokens=(64, 128), at_end=True, prefix=prefix)
        between = do(sequence.prefill(hidden, waypoints=places))
        assert not any(one.snapshot_id for one in sequence.waypoints), "the last span's reply tells"
        outputs = do(sequence.prefill(between, span=1, waypoints=places))
        assert [(one.position, one.skipped) for one in sequence.waypoints] == [(n, None) for n in (64, 128, 200)]
        found = do(client.open_many(2, prefix=prefix, reuse="if_cheaper"))
        assert {one.position for one in found} == {128} and found[0].match.snapshot_id
        for one in found:
            again = do(one.prefill(do(one.prefill(hidden[128:])), span=1))
            np.testing.assert_allclose(again, outputs[128:], rtol=1e-4, atol=1e-4)
        longer = Prefix.of_tokens([*IDS[:201], 0], at=(201,))
        for span in (0, 1):
            do(sequence.decode(tokens(1), span=span))
        made = do(sequence.snapshot(key=dict(zip(longer.positions, longer.keys, strict=True))[201], pin=True))
        assert do(client.snapshots.find(longer)).snapshot_id == made.id
        do(client.disconnect())
