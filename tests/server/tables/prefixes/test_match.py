"""What an open begins with, of what is stored: by policy, and without figures the deepest."""

from __future__ import annotations

import pytest

from deltaline_server.tables.prefixes.cost import ReusePolicy, StoredPrefix, Tier, Way
from deltaline_server.tables.prefixes.index import Found, Miss
from deltaline_server.tables.prefixes.match import Match, match

DEEP, NEAR = StoredPrefix(800, b"deep", Tier.FILE, 1000), StoredPrefix(700, b"near", Tier.DEVICE, 1000)
WAYS = {Tier.FILE: Way(1.0, 1000.0)}


@pytest.mark.parametrize(
    ("policy", "rate", "expected"),
    [
        (ReusePolicy.ALWAYS, 100.0, Match(DEEP, 2.0, 2.0, None, 900)),
        (ReusePolicy.IF_CHEAPER, 100.0, Match(NEAR, 0.0, 3.0, None, 900)),
        (ReusePolicy.IF_CHEAPER, None, Match(DEEP, 2.0, None, None, 900)),
    ],
)
def test_what_is_taken(policy: ReusePolicy, rate: float | None, expected: Match) -> None:
    found = Found((DEEP, NEAR), None, 900)
    assert match(found, policy, prompt_tokens=1000, prefill_tokens_per_s=rate, ways=WAYS) == expected


def test_what_costs_more_to_bring_back_than_to_compute_is_not_taken_and_is_no_miss() -> None:
    found = Found((DEEP,), None, 0)
    taken = match(found, ReusePolicy.IF_CHEAPER, prompt_tokens=1000, prefill_tokens_per_s=1e4, ways=WAYS)
    assert taken == Match(None, 0.0, 0.1, None, 0)


def test_a_miss_keeps_its_reason() -> None:
    found = Found((), Miss.EVICTED, 40)
    taken = match(found, ReusePolicy.ALWAYS, prompt_tokens=1000, prefill_tokens_per_s=None, ways={})
    assert taken == Match(None, 0.0, None, Miss.EVICTED, 40)
