"""The cases of mixtures of experts with their bars. The figures are for an H200."""

from __future__ import annotations

from typing import Any

from deltaline_bench.bar import at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row
from deltaline_bench.moe.batch import Batch, Shape
from deltaline_bench.moe.sides import ours, peers

FAMILY = Family(Batch, ours, peers)
# Experts, of which a token has so many, hidden size, their own size.
QWEN35, QWEN3_NEXT = (256, 8, 2048, 512), (512, 10, 2048, 512)
# An eighth of the experts of DeepSeek-V3, as one of 8 GPUs has them.
DEEPSEEK: dict[str, Any] = {"groups": (8, 4), "is_sigmoid": True, "is_gated": False, "scale": 2.5}


def _row(
    model: str,
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    needed: float | None = None,
    aim: float | None = None,
    **more: Any,
) -> Row[Shape]:
    words = f"{num_tokens} token{'s' * (num_tokens > 1)}, {model}"
    return Row(f"{model}-{num_tokens}", words, Shape(num_tokens, *sizes, **more), *pair(at_most_us, needed, aim))


ROWS = (
    _row("35b-a3b", 1, QWEN35, 19, 17),
    _row("35b-a3b", 4, QWEN35),
    _row("35b-a3b", 16, QWEN35),
    _row("35b-a3b", 64, QWEN35, 440, 400),
    _row("35b-a3b", 256, QWEN35),
    _row("35b-a3b", 1024, QWEN35),
    _row("35b-a3b", 2048, QWEN35),
    # 464 GFLOP: 400 and 480 TFLOP/s.
    _row("35b-a3b", 8192, QWEN35, 1160, 966),
    _row("qwen3-next", 1, QWEN3_NEXT),
    _row("qwen3-next", 64, QWEN3_NEXT),
    _row("qwen3-next", 8192, QWEN3_NEXT),
    _row("deepseek-v3", 1, (32, 4, 7168, 2048), **DEEPSEEK),
    _row("deepseek-v3", 64, (32, 4, 7168, 2048), **DEEPSEEK),
    _row("deepseek-v3", 4096, (32, 4, 7168, 2048), **DEEPSEEK),
)
SUITE = Suite("moe", FAMILY.cases(ROWS))
