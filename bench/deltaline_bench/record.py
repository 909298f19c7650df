"""What a run found, as it is kept in JSON. Knows numbers and words, neither tensors nor how to measure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

# Behind the name of a file that has not all cases of its suite.
PARTIAL = "-partial"


class Status(StrEnum):
    """What became of a side; only a right one is a side to beat."""

    RIGHT = "right"
    WRONG = "WRONG"
    FAILED = "FAILED"
    MISSING = "not installed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class SideRecord:
    """One side of a case; figures are None where they were not taken.

    Args:
        detail: why it was not timed, or not captured.
        speedup: its time / the time of our judged side.
    """

    name: str
    is_ours: bool
    status: Status
    detail: str = ""
    is_captured: bool | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    gigabytes_per_s: float | None = None
    share_of_copy: float | None = None
    error: float | None = None
    largest_error: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class BarRecord:
    """One bar and whether it was met; None where there was nothing to compare with."""

    text: str
    is_needed: bool
    is_met: bool | None


@dataclass(frozen=True)
class CaseRecord:
    """One case; `ratio` is the fastest right peer's time / ours."""

    name: str
    what: str
    shapes: dict[str, str]
    dtype: str
    num_bytes: int
    num_flops: int
    max_error: float
    sides: tuple[SideRecord, ...]
    bars: tuple[BarRecord, ...]
    best_peer: str | None
    ratio: float | None

    @property
    def judged(self) -> SideRecord:
        """Our side that the bars look at."""
        return next(side for side in self.sides if side.is_ours)

    def failures(self) -> list[str]:
        """Say what makes the run fail: our sides that are not right, and the needed bars that are missed."""
        bad = {Status.WRONG, Status.FAILED}
        found = [f"{side.name} is {side.status}" for side in self.sides if side.is_ours and side.status in bad]
        if self.judged.status in (Status.MISSING, Status.NOT_APPLICABLE) and self.bars:
            found.append(f"{self.judged.name} is {self.judged.status}")
        return found + [f"{bar.text} is missed" for bar in self.bars if bar.is_needed and bar.is_met is False]


@dataclass(frozen=True)
class RunRecord:
    """One run of a suite. device: its name and versions. peers: the version of each known peer."""

    suite: str
    date: str
    rounds: int
    device: dict[str, str]
    peers: dict[str, str]
    floor_us: float
    copy_bytes_per_s: float
    read_bytes_per_s: float
    cases: tuple[CaseRecord, ...]

    @property
    def file_stem(self) -> str:
        """Name the run's files: date, device (`NVIDIA H200` is h200) and suite."""
        device = self.device["name"].lower().removeprefix("nvidia ")
        return f"{self.date}-{re.sub('[^a-z0-9]+', '-', device).strip('-')}-{self.suite}"

    def failures(self) -> list[str]:
        """Say what makes the run fail, case by case."""
        return [f"{case.name}: {what}" for case in self.cases for what in case.failures()]

    def to_json(self) -> str:
        """Write the record; `from_json` reads it back as it was."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read a record.

        Raises:
            ValueError: the text is not a record.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(**fields | {"cases": tuple(_read_case(case) for case in fields["cases"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a record of a run: {error}") from error


def _read_case(fields: dict[str, Any]) -> CaseRecord:
    sides = tuple(SideRecord(**side | {"status": Status(side["status"])}) for side in fields["sides"])
    bars = tuple(BarRecord(**bar) for bar in fields["bars"])
    return CaseRecord(**fields | {"sides": sides, "bars": bars})
