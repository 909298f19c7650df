"""What it takes to go on from a stored state, beside computing its tokens again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Tier(IntEnum):
    """Where a snapshot lies, the nearest first; the values of deltaline.v1.Tier."""

    DEVICE = 1
    HOST = 2
    FILE = 3


class ReusePolicy(IntEnum):
    """When an open begins with a stored state that it finds."""

    ALWAYS = 1
    IF_CHEAPER = 2


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A stored state that a prompt may go on from. num_bytes: what would have to be brought back."""

    position: int
    snapshot: bytes
    tier: Tier
    num_bytes: int


@dataclass(frozen=True)
class Way:
    """A tier's way back to the device, as measured: a restore takes latency_s, and its bytes at bytes_per_s."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Estimate:
    """A way to a prompt's state, from a stored prefix or from nothing (None), and how long its two parts take."""

    prefix: StoredPrefix | None
    restore_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.restore_s + self.compute_s


def estimate(
    prefix: StoredPrefix | None, *, prompt_tokens: int, prefill_tokens_per_s: float, ways: Mapping[Tier, Way]
) -> Estimate:
    """How long the state of a prompt takes from a prefix. prefill_tokens_per_s: what this server computes, above 0.

    ways: of every other tier in use; on the device a restore moves no state and shares pages.
    """
    if prefix is None:
        return Estimate(None, 0.0, prompt_tokens / prefill_tokens_per_s)
    compute_s = (prompt_tokens - prefix.position) / prefill_tokens_per_s
    if prefix.tier is Tier.DEVICE:
        return Estimate(prefix, 0.0, compute_s)
    way = ways[prefix.tier]
    return Estimate(prefix, way.latency_s + prefix.num_bytes / way.bytes_per_s, compute_s)


def choose(
    prefixes: Sequence[StoredPrefix],
    policy: ReusePolicy,
    *,
    prompt_tokens: int,
    prefill_tokens_per_s: float,
    ways: Mapping[Tier, Way],
) -> Estimate:
    """What an open begins with, of prefixes in the order of PrefixIndex.find, the deepest first.

    ALWAYS takes the deepest. IF_CHEAPER takes what is there soonest, which may be a shallower state that is nearer, or
    nothing at all; of equals the deepest.
    """
    options: list[StoredPrefix | None] = [*prefixes, None]
    if policy is ReusePolicy.ALWAYS:
        options = options[:1]
    estimates = [
        estimate(option, prompt_tokens=prompt_tokens, prefill_tokens_per_s=prefill_tokens_per_s, ways=ways)
        for option in options
    ]
    return min(estimates, key=lambda each: each.total_s)
