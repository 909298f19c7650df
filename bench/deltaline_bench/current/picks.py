"""The few figures that the README and the picture show. Knows cases by name alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltaline_bench.current.records import Line, Record
from deltaline_bench.current.tables import Table


@dataclass(frozen=True)
class Pick:
    """A line that is shown, and what it is in words."""

    what: str
    table: str
    case: str

    def find(self, tables: Mapping[str, Table]) -> tuple[Line, Record]:
        """Find the line and its record.

        Raises:
            ValueError: no current line is that.
        """
        try:
            return tables[self.table].find(self.case)
        except KeyError as error:
            raise ValueError(f"no record has the case {self.case} of {self.table}") from error


def _on_h200(what: str, suite: str, case: str) -> Pick:
    return Pick(what, f"{suite}, NVIDIA H200", case)


PICKS = (
    _on_h200("gated delta rule, prefill of 4 x 8,192 tokens", "Kernels: gated_delta", "prefill-4x8192"),
    _on_h200("gated delta rule, decode of 64 rows", "Kernels: gated_delta", "decode-64"),
    _on_h200("KDA, decode of 64 rows", "Kernels: kda", "decode-64"),
    _on_h200("Mamba2, prefill of 8 x 2,048 tokens", "Kernels: mamba2", "prefill-8x2048"),
    _on_h200("Mamba2, decode of 64 rows", "Kernels: mamba2", "decode-64"),
    _on_h200("convolution, prefill of 8 x 2,048 tokens", "Kernels: conv1d", "prefill-8x2048"),
    _on_h200("attention, decode of 32 rows of 8,192 keys", "Kernels: attention", "decode-32x8192"),
    _on_h200("experts of the 35B-A3B shape, 64 tokens", "Kernels: moe", "35b-a3b-64"),
    _on_h200("hyper-connections, 4,096 tokens", "Kernels: mhc", "pre-4096x4096"),
    _on_h200("27B shape, whole, decode of 64 rows", "Model 27b", "decode of 64 rows"),
    _on_h200("35B-A3B shape, whole, decode of 64 rows", "Model 35b-a3b", "decode of 64 rows"),
)
