"""A case of a suite, and the sides that compute it. Knows tensors by name only, not what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.bar import Bar
from deltaline_bench.peers import Peers

# Relative norm of the error that a side may have, by the dtype of its inputs.
ERROR_LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


class NotApplicable(Exception):
    """A side does not offer what the case asks for; the message says what."""


@dataclass(frozen=True)
class Side:
    """One implementation, ready to run on the inputs of its case.

    Args:
        call: what is timed; returns the tensors that it writes (a tensor or a tuple), all of which are overwritten
            with NaN before the check.
        outputs: from what `call` returned, the outputs and states by the names of the case's expected tensors.
        reset: puts back the state that `call` mutates.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], Mapping[str, Tensor]]
    reset: Callable[[], object]


SideMaker = Callable[[], Side]


@dataclass(frozen=True)
class Case:
    """One row of a suite's table with its inputs.

    Args:
        what: one line of words. shapes, dtype: for the report.
        num_bytes: the least that must move: each input read once, each output written once.
        num_flops: multiplications and additions.
        max_error: the relative norm of the error that a side may have.
        expected: fp32 tensors by name; a side is compared on the names it returns.
        ours: our sides; the first one is judged by the bars. peers: the sides to beat.
        needed, aim: the bars; a missed aim is reported, a missed need fails the run.
    """

    name: str
    what: str
    shapes: Mapping[str, str]
    dtype: torch.dtype
    num_bytes: int
    num_flops: int
    max_error: float
    expected: Mapping[str, Tensor]
    ours: Mapping[str, SideMaker]
    peers: Mapping[str, SideMaker]
    needed: tuple[Bar, ...] = ()
    aim: tuple[Bar, ...] = ()


CaseMaker = Callable[[torch.device, Peers], Case]


@dataclass(frozen=True)
class Suite:
    """The cases of one kernel by name; a case's inputs live from its making until the next one is made."""

    name: str
    cases: Mapping[str, CaseMaker]
