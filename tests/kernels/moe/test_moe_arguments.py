"""What is refused: each error names the argument, what was expected and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from rigs.kernels.expert_batches import make_batch
from rigs.kernels.paths import Path

from deltaline_kernels import Router, route_tokens, run_experts

CPU = Path("cpu", torch.float32)


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"top_k": 0}, ValueError, "top_k: expected at least 1, got 0"),
        ({"top_k": 65}, ValueError, "top_k: expected at most 64, got 65"),
        ({"top_k": 2.0}, TypeError, "top_k: expected an integer, got float"),
        ({"scoring": "relu"}, ValueError, "scoring: expected softmax or sigmoid, got 'relu'"),
        ({"normalize": 1}, TypeError, "normalize: expected a bool, got int"),
        ({"num_groups": 0}, ValueError, "num_groups: expected at least 1, got 0"),
        ({"num_groups": 2, "top_groups": 3}, ValueError, "top_groups: expected at most num_groups, 2, got 3"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
        ({"num_shared": -1}, ValueError, "num_shared: expected 0..64, got -1"),
        ({"num_shared": None}, TypeError, "num_shared: expected an integer, got NoneType"),
        ({"shared_gate": True}, ValueError, "shared_gate: expected False without shared experts, got True"),
    ],
)
def test_wrong_routers_are_refused(told: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        Router(**{"top_k": 2, **told})


@pytest.mark.parametrize(
    ("router", "told", "words"),
    [
        (Router(5), {}, "top_k: expected at most 4 experts, those of 1 groups of 4, got 5"),
        (Router(2, num_groups=3), {}, "num_groups: expected a divisor of 4 experts, got 3"),
        (Router(3, num_groups=2), {}, "top_k: expected at most 2 experts, those of 1 groups of 2, got 3"),
        (Router(2, num_groups=4, top_groups=2), {"bias": torch.zeros(4)}, "num_groups: expected groups of at least 2"),
        (Router(1, num_shared=1, shared_gate=True), {"logits": torch.zeros(2, 1)}, "logits: expected 1..4096 experts"),
        (Router(2), {"bias": torch.zeros(5)}, "bias: expected shape [4], got [5]"),
        (Router(2), {"query_start_loc": torch.zeros(0, dtype=torch.int32)}, "query_start_loc: expected shape [N+1]"),
        (Router(2), {"logits": torch.zeros(4)}, "logits: expected shape [*, *], got [4]"),
    ],
)
def test_wrong_logits_are_refused(router: Router, told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        route_tokens(**{"logits": torch.zeros(2, 4), "router": router, **told})


def test_a_router_is_expected() -> None:
    with pytest.raises(TypeError, match=r"^router: expected a Router, got int$"):
        route_tokens(torch.zeros(2, 4), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"x": torch.zeros(3, 47)}, ValueError, "gate_up: expected shape [*, *, 47], got [4, 80, 48]"),
        ({"x": torch.zeros(3, 48, dtype=torch.float64)}, TypeError, "x: expected torch.float32 or"),
        ({"gate_up": torch.zeros(4, 81, 48)}, ValueError, "gate_up: expected shape [E, 2 I, H], none of them 0"),
        (
            {"gate_up": torch.zeros(4, 80, 48).half()},
            TypeError,
            "gate_up: expected torch.float32 or torch.float8_e4m3fn, got",
        ),
        ({"down": torch.zeros(4, 48, 39)}, ValueError, "down: expected shape [4, 48, 40], got [4, 48, 39]"),
        ({"down": torch.zeros(4, 40, 48).mT}, ValueError, "down: expected a contiguous tensor"),
        ({"weights": torch.zeros(2, 2)}, ValueError, "weights: expected shape [3, *], got [2, 2]"),
        ({"weights": torch.zeros(3, 0)}, ValueError, "weights: expected at least 1 choice per token"),
        ({"experts": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "experts: expected shape [3, 2], got [3, 1]"),
        ({"experts": torch.zeros(3, 2)}, TypeError, "experts: expected torch.int32, got torch.float32"),
    ],
)
def test_wrong_batches_are_refused(told: dict[str, Any], error: type[Exception], words: str) -> None:
    batch = make_batch(CPU, 3, 2, 4)
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        run_experts(**{**vars(batch), **told})


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"gate_up_scales": None}, TypeError, "gate_up_scales: expected a tensor, got NoneType"),
        (
            {"gate_up_scales": torch.ones(4, 2, 2)},
            ValueError,
            "gate_up_scales: expected shape [4, 4, 2], got [4, 2, 2]",
        ),
        ({"down_scales": torch.ones(4, 2)}, ValueError, "down_scales: expected shape [4, 2, 2], got [4, 2]"),
        (
            {"down_scales": torch.ones(4, 2, 2).half()},
            TypeError,
            "down_scales: expected torch.float32, got torch.float16",
        ),
        ({"down": torch.zeros(4, 150, 140)}, TypeError, "down: expected torch.float8_e4m3fn, got torch.float32"),
        ({"gate_up": torch.zeros(4, 280, 150)}, TypeError, "down: expected torch.float32, got torch.float8_e4m3fn"),
    ],
)
def test_wrong_weights_in_fp8_are_refused(told: dict[str, Any], error: type[Exception], words: str) -> None:
    batch = make_batch(CPU, 3, 2, 4, 150, 140).in_fp8()
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        run_experts(**{**vars(batch), **told})


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"limit": -1.0}, ValueError, "limit: expected at least 0, and 0 with silu, got -1.0"),
        ({"limit": "10"}, TypeError, "limit: expected a number, got str"),
        ({"limit": float("nan")}, ValueError, "limit: expected a finite number, got nan"),
    ],
)
def test_wrong_limits_are_refused(told: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        run_experts(**{**vars(make_batch(CPU, 3, 2, 4)), **told})
    without_gates = vars(make_batch(CPU, 3, 2, 4, activation="relu2")) | {"limit": 1.0}
    with pytest.raises(ValueError, match=r"^limit: expected at least 0, and 0 with relu2, got 1\.0"):
        run_experts(**without_gates)


def test_scales_of_other_weights_are_refused() -> None:
    words = "down_scales: expected None beside weights in torch.float32, got a tensor"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        run_experts(**{**vars(make_batch(CPU, 3, 2, 4)), "down_scales": torch.ones(4, 1, 1)})
