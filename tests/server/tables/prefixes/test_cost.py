"""What an open begins with: the deepest state, or what is there soonest."""

from __future__ import annotations

import pytest

from deltaline_server.tables.prefixes.cost import Estimate, ReusePolicy, StoredPrefix, Tier, Way, choose, estimate

FILE = StoredPrefix(8000, b"file", Tier.FILE, 150_000_000)
HOST = StoredPrefix(7000, b"host", Tier.HOST, 150_000_000)
DEVICE = StoredPrefix(6000, b"device", Tier.DEVICE, 150_000_000)
WAYS = {Tier.HOST: Way(0.001, 50e9), Tier.FILE: Way(0.05, 1e9)}


def chosen(policy: ReusePolicy, *prefixes: StoredPrefix, tokens_per_s: float = 10_000.0) -> Estimate:
    return choose(prefixes, policy, prompt_tokens=8192, prefill_tokens_per_s=tokens_per_s, ways=WAYS)


def test_an_estimate_is_latency_and_bytes_and_the_tokens_that_are_left() -> None:
    found = estimate(FILE, prompt_tokens=8192, prefill_tokens_per_s=1000.0, ways=WAYS)
    assert (found.restore_s, found.compute_s, found.total_s) == pytest.approx((0.2, 0.192, 0.392))
    found = estimate(DEVICE, prompt_tokens=8192, prefill_tokens_per_s=1000.0, ways={})
    assert (found.restore_s, found.compute_s) == pytest.approx((0.0, 2.192))
    found = estimate(None, prompt_tokens=8192, prefill_tokens_per_s=1000.0, ways={})
    assert found.prefix is None and (found.restore_s, found.compute_s) == pytest.approx((0.0, 8.192))


def test_always_takes_the_deepest() -> None:
    assert chosen(ReusePolicy.ALWAYS, FILE, HOST, DEVICE, tokens_per_s=1e9).prefix is FILE
    assert chosen(ReusePolicy.ALWAYS).prefix is None


def test_if_cheaper_takes_what_is_there_soonest() -> None:
    assert chosen(ReusePolicy.IF_CHEAPER, FILE, HOST, DEVICE, tokens_per_s=1000.0).prefix is FILE
    assert chosen(ReusePolicy.IF_CHEAPER, FILE, HOST, DEVICE).prefix is HOST
    assert chosen(ReusePolicy.IF_CHEAPER, FILE, HOST, DEVICE, tokens_per_s=1e6).prefix is DEVICE
    assert chosen(ReusePolicy.IF_CHEAPER, FILE, tokens_per_s=100_000.0).prefix is None
    assert chosen(ReusePolicy.IF_CHEAPER).prefix is None


def test_of_equals_the_deepest_is_taken() -> None:
    nothing_gained = StoredPrefix(1000, b"host", Tier.HOST, 0)
    ways = {Tier.HOST: Way(1.0, 1e9)}
    found = choose([nothing_gained], ReusePolicy.IF_CHEAPER, prompt_tokens=2000, prefill_tokens_per_s=1000.0, ways=ways)
    assert found.prefix is nothing_gained
