"""Bars are met and missed on the right side of their figure."""

from __future__ import annotations

import pytest

from deltaline_bench.bar import Bar, Score, at_least_copy, at_least_peers, at_most_us


@pytest.mark.parametrize(
    ("bar", "just_met", "just_missed", "text"),
    [
        (at_most_us(5.2), Score(5.2, 0.0, None), Score(5.21, 9.9, 9.9), "<= 5.2 us"),
        (at_least_copy(85), Score(1e9, 0.85, None), Score(0.0, 0.849, 9.9), ">= 85% of copy"),
        (at_least_peers(1.38), Score(1e9, 0.0, 1.38), Score(0.0, 9.9, 1.379), ">= 1.38x every peer"),
    ],
    ids=["time", "copy", "peers"],
)
def test_bar_is_met_up_to_its_figure(bar: Bar, just_met: Score, just_missed: Score, text: str) -> None:
    assert bar.is_met(just_met) is True
    assert bar.is_met(just_missed) is False
    assert str(bar) == text


def test_lead_over_peers_is_not_judged_without_a_peer() -> None:
    assert at_least_peers(1.38).is_met(Score(1.0, 1.0, None)) is None
