"""What `deltaline top` shows: a frame, and in it what a server did between two readings of its metrics page.

A sample's key is its name and its labels, as Prometheus' format spells them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from deltaline_client import AdapterList, ServerInfo, ServerLoad

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Samples = Mapping[str, float]


@dataclass(frozen=True)
class Rates:
    """Two readings, `seconds` apart. A counter that is lower in the later one began anew: the server is another one."""

    before: Samples
    after: Samples
    seconds: float

    @cached_property
    def _grown(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """How much each counter grew, by name, with its labels."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for key, value in self.after.items():
            name, labels = parse(key)
            before = self.before.get(key, 0.0)
            found.setdefault(name, []).append((labels, value - before if value >= before else value))
        return found

    def grown(self, name: str, **labels: str) -> float:
        """How much the counters of a name with these labels grew, all of them together."""
        return sum(grown for has, grown in self._grown.get(name, ()) if labels.items() <= has.items())

    def rate(self, name: str, **labels: str) -> float:
        """The same a second."""
        return self.grown(name, **labels) / self.seconds

    def by(self, name: str, label: str) -> dict[str, float]:
        """How much the counters of a name grew by the values of a label, the largest first; none that stood still."""
        values = {has.get(label, "") for has, _ in self._grown.get(name, ())}
        grown = {value: self.grown(name, **{label: value}) for value in values}
        return dict(sorted(((v, n) for v, n in grown.items() if n > 0), key=lambda item: (-item[1], item[0])))

    def labels(self, name: str, label: str) -> list[str]:
        """The values of a label that samples of a name have."""
        return [has[label] for has, _ in self._grown.get(name, ()) if label in has]

    def gauge(self, name: str, **labels: str) -> float:
        """The latest value of a gauge, 0 for one that the server has not."""
        return sum(value for key, value in self.after.items() if parse(key) == (name, labels))

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """The value below which this share of a histogram's new observations is, None where there are none.

        Within a bucket they count as spread evenly, as Prometheus' histogram_quantile has it.
        """
        counts: dict[float, float] = {}
        for has, grown in self._grown.get(f"{name}_bucket", ()):
            if labels.items() <= has.items():
                bound = float(has["le"])
                counts[bound] = counts.get(bound, 0.0) + grown
        bounds = sorted(counts)
        if not bounds or counts[bounds[-1]] <= 0:
            return None
        wanted, low, below = share * counts[bounds[-1]], 0.0, 0.0
        for bound in bounds:
            if counts[bound] >= wanted:
                if bound == float("inf"):
                    return low
                inside = counts[bound] - below
                return low + (bound - low) * ((wanted - below) / inside if inside else 1.0)
            low, below = bound, counts[bound]
        return low


def parse(key: str) -> tuple[str, dict[str, str]]:
    """Split a sample's key into its name and its labels."""
    name, _, labels = key.partition("{")
    return name, dict(_LABEL.findall(labels))


@dataclass(frozen=True)
class Frame:
    """All that a frame shows.

    rates: None where no metrics are read, or why they can't be. adapters: None where the server keeps none. error: why
    the server could not be asked just now; then the rest is what it said last.
    """

    address: str
    info: ServerInfo
    load: ServerLoad
    adapters: AdapterList | None
    rates: Rates | str | None
    error: str = ""
