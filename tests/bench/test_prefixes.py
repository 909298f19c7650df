"""The simulation of hit rates: turns are what they are said to be, and ours restores more than LRU of whole paths."""

from __future__ import annotations

from dataclasses import replace

import prefixes
import pytest

SMALL = prefixes.Load(conversations=64, turns=8, lines=32, system_prompts=2)


def test_a_seed_names_the_turns_and_all_conversations_have_theirs() -> None:
    first, again, other = (list(prefixes.turns_of(SMALL, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == SMALL.conversations * SMALL.turns
    ends = [turn.prefixes[-1][0] for turn in first]
    assert len(set(ends)) == len(ends)  # no prompt is asked for twice
    assert {turn.prefixes[0][0] for turn in first} == set(range(SMALL.system_prompts))
    assert max(len(turn.prefixes) for turn in first) == 2 * SMALL.turns


def test_a_turn_goes_on_from_the_one_before_an_edited_one_from_an_earlier() -> None:
    plain = list(prefixes.turns_of(SMALL, 1))
    followed = {(*turn.prefixes, turn.generated) for turn in plain}
    assert all(len(turn.prefixes) == 2 or turn.prefixes[:-1] in followed for turn in plain)
    edited = list(prefixes.turns_of(replace(SMALL, edited=0.5), 1))
    pasts = [turn.prefixes[:-1] for turn in edited if len(turn.prefixes) > 2]
    assert len(set(pasts)) < len(pasts)
    rewritten = list(prefixes.turns_of(replace(SMALL, rewritten=1.0), 1))
    followed = {(*turn.prefixes, turn.generated) for turn in rewritten}
    assert not any(turn.prefixes[:-1] in followed for turn in rewritten)


def test_with_lines_for_all_every_policy_restores_the_same() -> None:
    rates = prefixes.compare(replace(SMALL, lines=1200), 1)
    assert len({each.tokens for each in rates.values()}) == 1
    assert rates["ours"].tokens > 0.9
    assert set(rates["ours"].misses) == {"NEVER_STORED"}


def test_path_lru_refreshes_the_path_and_node_lru_does_not() -> None:
    for policy, victim in ((prefixes.PathLru(), b"other"), (prefixes.NodeLru(), b"root")):
        policy.stored(b"root", 1, None)
        policy.stored(b"other", 1, None)
        policy.stored(b"leaf", 2, b"root")
        policy.consumed(b"leaf")
        assert policy.victim() == victim
        policy.gone(b"root")
        policy.gone(b"other")
        assert policy.victim() == b"leaf"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ours_restores_more_than_lru_of_whole_paths(seed: int) -> None:
    rates = prefixes.compare(SMALL, seed)
    assert prefixes.margin(rates) >= prefixes.BAR
    assert rates["ours"].own_turns > 1.5 * rates["path LRU"].own_turns
