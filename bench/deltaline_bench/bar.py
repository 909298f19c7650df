"""What a case must reach: a time, a share of the copy bandwidth, or a lead over every peer. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a bar looks at; the value is the pattern of its text."""

    TIME = "<= {:g} us"
    COPY = ">= {:g}% of copy"
    PEERS = ">= {:g}x every peer"


@dataclass(frozen=True)
class Score:
    """What was measured of our side.

    Args:
        time_us: median time.
        share_of_copy: minimal bytes / (time x copy bandwidth of this run), 1.0 is a copy.
        ratio: time of the fastest right peer / our time; None where no peer was timed.
    """

    time_us: float
    share_of_copy: float
    ratio: float | None


@dataclass(frozen=True)
class Bar:
    """One bar; `value` is in us, in per cent, or a factor, as `kind` says."""

    kind: Kind
    value: float

    def __str__(self) -> str:
        return self.kind.value.format(self.value)

    def is_met(self, score: Score) -> bool | None:
        """Say whether `score` reaches the bar; None where there was no peer to compare with."""
        if self.kind is Kind.TIME:
            return score.time_us <= self.value
        if self.kind is Kind.COPY:
            return score.share_of_copy * 100 >= self.value
        return None if score.ratio is None else score.ratio >= self.value


def at_most_us(value: float) -> Bar:
    """Make a bar on the median time."""
    return Bar(Kind.TIME, value)


def at_least_copy(percent: float) -> Bar:
    """Make a bar on the share of this run's copy bandwidth."""
    return Bar(Kind.COPY, percent)


def at_least_peers(factor: float) -> Bar:
    """Make a bar on the lead over the fastest peer."""
    return Bar(Kind.PEERS, factor)


def pair(
    make: Callable[[float], Bar], needed: float | None, aim: float | None = None
) -> tuple[tuple[Bar, ...], tuple[Bar, ...]]:
    """Make the needed bars and the aims of a case that has at most one of each."""
    return () if needed is None else (make(needed),), () if aim is None else (make(aim),)
