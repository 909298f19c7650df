"""What a bench prints and writes: tables for people, a record for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from deltaline_cli.bench.options import KINDS, BenchOptions, Kind
from deltaline_cli.bench.samples import STAGES, Samples
from deltaline_cli.bench.verdict import Verdict
from deltaline_cli.text import table
from deltaline_client import ServerInfo

PERCENTILES = (50, 90, 99)
NO_METRICS = "give --metrics-url: a reply does not tell which batches it shared with others"


@dataclass(frozen=True)
class Report:
    """A run that held its load. busy: the device's share of the time, or why it is not known."""

    options: BenchOptions
    info: ServerInfo
    samples: Samples
    verdict: Verdict
    busy: float | str

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that were measured."""
        return [kind for kind in KINDS if (self.samples.due() & self.samples.is_kind(kind)).any()]

    @property
    def stages(self) -> list[str]:
        """The stages that a run of this kind has: only in an open loop does a step wait for a client."""
        return [stage for stage in STAGES if stage != "wait" or self.options.rate is not None]

    def speed(self, kind: Kind) -> dict[str, float]:
        """Steps, and steps, rows and tokens per second of a kind, done in the measured time."""
        done = self.samples.done(kind)
        steps = int(done.sum())
        rows = steps * (1 if kind == "prefill" else self.options.rows)
        tokens = float(self.samples.column("tokens")[done].sum())
        seconds = self.samples.seconds
        return {
            "steps": steps,
            "steps_per_s": steps / seconds,
            "rows_per_s": rows / seconds,
            "tokens_per_s": tokens / seconds,
        }

    def percentiles_ms(self, kind: Kind, stage: str) -> list[float] | None:
        """PERCENTILES of a stage in milliseconds, None where no step has it."""
        seconds = self.samples.stages_s(kind)[stage]
        known = seconds[np.isfinite(seconds)]
        return [float(value) * 1e3 for value in np.percentile(known, PERCENTILES)] if len(known) else None

    def text(self) -> str:
        """The tables and the lines below them."""
        speeds = [("", "steps", "steps/s", "rows/s", "tokens/s")]
        times = [("ms", "stage", *(f"p{percentile}" for percentile in PERCENTILES))]
        for kind in self.kinds:
            steps, *rates = self.speed(kind).values()
            speeds.append((kind, f"{steps:.0f}", *(f"{rate:.1f}" for rate in rates)))  # type: ignore[arg-type]
            for stage in self.stages:
                values = self.percentiles_ms(kind, stage)
                cells = ["-"] * len(PERCENTILES) if values is None else [f"{value:.3f}" for value in values]
                times.append((kind if stage == "total" else "", stage, *cells))
        return "\n".join([table(speeds, align="<>>>>"), "", table(times, align="<<>>>"), "", *self._notes()])

    def _notes(self) -> list[str]:
        busy = f"- ({self.busy})" if isinstance(self.busy, str) else f"{self.busy:.1%}"
        verdict = self.verdict
        lines = [f"device busy: {busy}"]
        if verdict.offered_per_s is not None:
            lines.append(
                f"offered {verdict.offered_per_s:.1f} steps/s, done {verdict.done_per_s:.1f}; "
                f"noticed {verdict.late_p99_s * 1e3:.2f} ms late at p99"
            )
        return [*lines, f"warning: {verdict.warning}"] if verdict.warning else lines

    def record(self) -> dict[str, Any]:
        """The report as JSON has it; times in milliseconds."""
        options = asdict(self.options) | {"prefill_tokens": str(self.options.prefill_tokens)}
        options |= {"output": None, "token": None}
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "server": {
                "version": self.info.version,
                "device": self.info.device,
                "model_type": self.info.model_type,
                "hidden_size": self.info.hidden_size,
                "dtype": self.info.dtype.name,
                "layers": sum(span.count for span in self.info.spans),
                "versions": dict(self.info.versions),
            },
            "options": options,
            "seconds": self.samples.seconds,
            "load": asdict(self.verdict),
            "device_busy": None if isinstance(self.busy, str) else self.busy,
            "device_busy_unknown": self.busy if isinstance(self.busy, str) else None,
            "percentiles": PERCENTILES,
            "kinds": {
                kind: self.speed(kind) | {"ms": {stage: self.percentiles_ms(kind, stage) for stage in self.stages}}
                for kind in self.kinds
            },
        }

    def write(self, path: Path) -> None:
        """Write the record as JSON. Raises OSError."""
        path.write_text(json.dumps(self.record(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
