"""The bench of moves: what its figures are judged by."""

from __future__ import annotations

from dataclasses import replace

import moves
import pytest

from deltaline_bench.service.figure import missed as missed_of

JUDGED = replace(moves.SIZES["h200"], is_judged=True)
# 250 MB ahead in a quarter of a second, 40 MB behind them.
MOVE = moves.Move(whole_s=0.4, slowest_s=0.055, bytes_ahead=250e6, bytes_frozen=40e6, ahead_s=0.25, frozen_s=0.05)


@pytest.mark.parametrize(
    ("way", "slowest_s", "bare", "missed"),
    [
        (moves.GRPC, 0.055, 1.4e9, []),
        (moves.GRPC, 0.070, 1.4e9, ["freeze, p50"]),
        (moves.GRPC, 0.055, 1.5e9, ["of a bare stream, p50"]),
        (moves.LINK, 0.055, 1.5e9, ["rate, p50"]),
    ],
)
def test_bars_are_of_the_median_freeze_and_the_rate_at_rest(
    way: str, slowest_s: float, bare: float, missed: list[str]
) -> None:
    """A freeze may take 20 ms, and 40 more for 40 MB at 1 GB/s; a step takes 4 ms."""
    stepped = [replace(MOVE, slowest_s=slowest_s, ahead_s=0.5)] * 2 + [replace(MOVE, slowest_s=1.0)]
    figures = moves.judge(JUDGED, way, 0.004, stepped, [MOVE] * 3, [bare] * 3)
    assert [figure.name for figure in missed_of(figures)] == missed
    unjudged = moves.judge(replace(JUDGED, is_judged=False), way, 0.004, stepped, [MOVE] * 3, [bare] * 3)
    assert not missed_of(unjudged)
