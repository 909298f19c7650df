"""What an open with a prompt's keys begins with, of all that is stored of the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deltaline_server.tables.prefixes.cost import ReusePolicy, StoredPrefix, Tier, Way, choose
from deltaline_server.tables.prefixes.index import Found, Miss


@dataclass(frozen=True)
class Match:
    """What is restored for a prompt. prefix: None where nothing is stored, or to compute is cheaper.

    restore_s: how long that takes; compute_s: how long the rest of the prompt takes, None where too little was computed
    so far to say. miss, shared_position: as Found has them.
    """

    prefix: StoredPrefix | None
    restore_s: float
    compute_s: float | None
    miss: Miss | None
    shared_position: int


def match(
    found: Found,
    policy: ReusePolicy,
    *,
    prompt_tokens: int,
    prefill_tokens_per_s: float | None,
    ways: Mapping[Tier, Way],
) -> Match:
    """Choose from what was found as `choose` does; the deepest where prefill_tokens_per_s is not known."""
    rate = math.inf if prefill_tokens_per_s is None else prefill_tokens_per_s
    if prefill_tokens_per_s is None:
        policy = ReusePolicy.ALWAYS
    best = choose(found.prefixes, policy, prompt_tokens=prompt_tokens, prefill_tokens_per_s=rate, ways=ways)
    compute_s = None if prefill_tokens_per_s is None else best.compute_s
    return Match(best.prefix, best.restore_s, compute_s, found.miss, found.shared_position)
