"""What add_lora, group_tokens, spread_slots and LoraWeights refuse, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltaline_kernels import LoraWeights, add_lora, group_tokens, spread_slots

# Two rows of one token.
SPREAD_SLOTS, SPREAD_STARTS = torch.zeros(2, dtype=torch.int32), torch.arange(3, dtype=torch.int32)

WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "x: expected a tensor, got list", {"x": [1.0]}),
    (TypeError, "x: expected torch.float32, got torch.bfloat16", {"x": torch.zeros(2, 6).bfloat16()}),
    (ValueError, r"x: expected shape \[\*, 6\], got \[2, 5\]", {"x": torch.zeros(2, 5)}),
    (ValueError, r"x: expected packed rows", {"x": torch.zeros(6, 2).t()}),
    (TypeError, "out: expected torch.float32 or", {"out": torch.zeros(2, 5).double()}),
    (TypeError, "weights: expected LoraWeights, got tuple", {"weights": ()}),
    (TypeError, "tiles: expected AdapterTiles, got NoneType", {"tiles": None}),
    (ValueError, "tiles: expected those of 2 tokens", {"tiles": group_tokens(torch.zeros(1, dtype=torch.int32), 3)}),
]


def good_weights() -> dict[str, Any]:
    return {
        "a": torch.zeros(3, 2, 4, 6),
        "b": torch.zeros(3, 4, 5),
        "ranks": torch.zeros(3, 2, dtype=torch.int32),
        "scales": torch.zeros(3, 2),
        "sizes": (2, 3),
        "factors": torch.zeros(3, 5),
    }


@pytest.mark.parametrize(("error", "message", "change"), WRONG, ids=[message for _, message, _ in WRONG])
def test_lora_names_the_wrong_argument(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "x": torch.zeros(2, 6),
        "out": torch.zeros(2, 5),
        "weights": LoraWeights(**good_weights()),
        "tiles": group_tokens(torch.zeros(2, dtype=torch.int32), 3),
    }
    add_lora(**good)
    with pytest.raises(error, match="^" + message):
        add_lora(**(good | change))


WRONG_WEIGHTS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "a: expected a tensor, got NoneType", {"a": None}),
    (ValueError, r"a: expected shape \[\*, 2, \*, \*\]", {"a": torch.zeros(3, 1, 4, 6)}),
    (ValueError, "a: expected at least 1 slot and 1 input, and a rank of 1..512", {"a": torch.zeros(3, 2, 513, 6)}),
    (ValueError, r"b: expected shape \[3, 4, 5\], got \[3, 5, 4\]", {"b": torch.zeros(3, 5, 4)}),
    (TypeError, "b: expected torch.float32, got torch.float16", {"b": torch.zeros(3, 4, 5).half()}),
    (TypeError, "ranks: expected torch.int32, got torch.int64", {"ranks": torch.zeros(3, 2, dtype=torch.int64)}),
    (ValueError, r"scales: expected shape \[3, 2\]", {"scales": torch.zeros(3)}),
    (TypeError, "sizes: expected a tuple of integers", {"sizes": [2, 3]}),
    (ValueError, "sizes: expected at least one slice of at least 1 output", {"sizes": (5, 0)}),
    (ValueError, r"factors: expected shape \[3, 5\]", {"factors": torch.zeros(3, 4)}),
]


@pytest.mark.parametrize(
    ("error", "message", "change"), WRONG_WEIGHTS, ids=[message for _, message, _ in WRONG_WEIGHTS]
)
def test_weights_name_the_wrong_argument(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    LoraWeights(**good_weights())
    with pytest.raises(error, match="^" + message):
        LoraWeights(**(good_weights() | change))


def test_group_tokens_names_the_wrong_argument() -> None:
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^token_slots: expected a tensor, got list"):
        group_tokens([0, 1], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^token_slots: expected torch\.int32, got torch\.int64"):
        group_tokens(slots.long(), 2)
    with pytest.raises(ValueError, match=r"^num_slots: expected at least 1, got 0"):
        group_tokens(slots, 0)
    with pytest.raises(ValueError, match=r"^max_rank: expected at least 1, got 0"):
        group_tokens(slots, 2, 0)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "row_slots: expected a tensor, got list", ([0], SPREAD_STARTS, 2)),
        (TypeError, "row_slots: expected torch.int32", (SPREAD_SLOTS.long(), SPREAD_STARTS, 2)),
        (ValueError, r"query_start_loc: expected shape \[3\], got \[2\]", (SPREAD_SLOTS, SPREAD_STARTS[:2], 2)),
        (TypeError, "num_tokens: expected an integer, got float", (SPREAD_SLOTS, SPREAD_STARTS, 2.0)),
        (ValueError, "num_tokens: expected at least 0, got -1", (SPREAD_SLOTS, SPREAD_STARTS, -1)),
    ],
    ids=str,
)
def test_rows_that_cannot_be_spread_are_refused(
    error: type[Exception], message: str, arguments: tuple[Any, Any, Any]
) -> None:
    with pytest.raises(error, match="^" + message):
        spread_slots(*arguments)
