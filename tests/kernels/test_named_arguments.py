"""Arguments that are no tensors or numbers at all: each is named, and none is taken for another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deltaline_kernels import (
    Rows,
    add_rms_norm,
    causal_conv1d,
    causal_conv1d_reference,
    flex_decode,
    gated_delta,
    gated_rms_norm,
    mamba2,
    rms_norm,
    rotate_and_store,
    rotate_and_store_reference,
    silu_and_mul,
)
from deltaline_kernels.checks import parse_number

NONE: Any = None
ROWS = Rows.build([2, 1], [1, 2], [1, 2], [2, 1], [0, 0], [0, 0], max_short=2, device="cpu")
KEPT = Rows.build([2, 1], [1, 2], [1, 2], [2, 1], [0, 0], [0, 0], max_short=2, device="cpu", token_lines=[[3, 4], [5]])


def delta(**told: Any) -> torch.Tensor:
    state, drafts = torch.zeros(3, 1, 4, 4), torch.zeros(3, 2, 2, 9)
    gates = torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(1), torch.zeros(1)
    return gated_delta(torch.ones(3, 12), *gates, state, drafts, ROWS, num_key_heads=1, **told)


def ssd(dt_limit: Any) -> torch.Tensor:
    state, drafts, weight = torch.zeros(3, 1, 4, 4), torch.zeros(3, 2, 2, 9), torch.zeros(1)
    given = torch.zeros(3, 12), torch.zeros(3, 1), weight, weight, weight, state, drafts, ROWS
    return mamba2(*given, num_groups=1, dt_limit=dt_limit)


def attend(rows: Rows = ROWS, **told: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    q, pages = (torch.randn(shape, generator=generator) for shape in ((3, 2, 4), (3, 16, 1, 4)))
    table = torch.arange(3, dtype=torch.int32)[:, None]
    return flex_decode(q, pages, pages, table, rows, **told)


WRONG: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "rms_norm": (TypeError, "x: expected a tensor, got NoneType", lambda: rms_norm(NONE, torch.ones(4), 0.0)),
    "add_rms_norm": (
        TypeError,
        "x: expected a tensor, got NoneType",
        lambda: add_rms_norm(NONE, torch.ones(1, 4), torch.ones(4), 0.0),
    ),
    "gated_rms_norm": (
        TypeError,
        "o: expected a tensor, got NoneType",
        lambda: gated_rms_norm(NONE, torch.ones(1, 1, 4), torch.ones(4), 0.0),
    ),
    "causal_conv1d": (
        TypeError,
        "x: expected a tensor, got NoneType",
        lambda: causal_conv1d(NONE, torch.ones(4, 4), None, torch.ones(3, 4, 4), ROWS),
    ),
    "silu_and_mul": (TypeError, "gate_up: expected a tensor, got NoneType", lambda: silu_and_mul(NONE)),
    "control": (TypeError, "control: expected a tensor, got NoneType", lambda: Rows(NONE, 0, 1, 1)),
    "scale-word": (TypeError, "scale: expected a number, got str", lambda: delta(scale="x")),
    "scale-tensor": (TypeError, "scale: expected a number, got Tensor", lambda: delta(scale=torch.ones(()))),
    "scale-zero": (ValueError, "scale: expected a positive number, got 0", lambda: delta(scale=0)),
    "eps-none": (TypeError, "eps: expected a number, got NoneType", lambda: delta(eps=None)),
    "attention-scale": (ValueError, "scale: expected a finite number, got nan", lambda: attend(scale=math.nan)),
    "limits-none": (TypeError, "dt_limit: expected two numbers, got None", lambda: ssd(None)),
    "limits-three": (TypeError, r"dt_limit: expected two numbers, got \(1, 2, 3\)", lambda: ssd((1, 2, 3))),
    "limits-word": (TypeError, r"dt_limit: expected two numbers, got \('a', 2\)", lambda: ssd(("a", 2))),
    "limits-order": (ValueError, "dt_limit: expected 0 <= least <= greatest", lambda: ssd((2, 1))),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named(case: str) -> None:
    kind, message, call = WRONG[case]
    with pytest.raises(kind, match=f"^{message}"):
        call()


def test_what_keeps_no_states_does_not_see_token_lines() -> None:
    """Rows that have such lines are for the recurrences; everything else of their layer takes them as they come."""
    bare = replace(KEPT, control=KEPT.control[:7], num_token_lines=0)
    assert torch.equal(attend(KEPT), attend(bare))

    def convolve(call: Callable[..., torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        x, lines = torch.arange(12.0).view(3, 4), torch.arange(96.0).view(6, 4, 4)
        return [call(x, torch.full((4, 4), 0.1), None, lines, rows), lines]

    def turn(call: Callable[..., torch.Tensor], rows: Rows) -> list[torch.Tensor]:
        q, pages = torch.arange(12.0).view(3, 1, 4), torch.zeros(2, 3, 16, 1, 4)
        table, angles = torch.arange(3, dtype=torch.int32)[:, None], torch.linspace(-1, 1, 64).view(16, 4)
        return [call(q, q, q, None, None, 1e-6, angles, pages[0], pages[1], table, rows), pages]

    both: tuple[tuple[Any, Any, Any], ...] = (
        (convolve, causal_conv1d, causal_conv1d_reference),
        (turn, rotate_and_store, rotate_and_store_reference),
    )
    for run, call, reference in both:
        want = run(call, bare)
        for way in (call, reference):
            for got, one in zip(run(way, KEPT), want, strict=True):
                torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-6)


def test_numbers_of_numpy_are_numbers() -> None:
    parse: Any = parse_number
    assert parse("scale", np.float32(0.5)) == parse("scale", np.int64(1)) / 2 == 0.5
    for value in (np.float32("inf"), np.float16("nan"), 10**400):
        with pytest.raises(ValueError, match=r"^scale: expected a finite number, got"):
            parse("scale", value)
    with pytest.raises(TypeError, match=r"^scale: expected a number, got bool"):
        parse("scale", np.bool_(True))
