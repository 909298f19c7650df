"""Modifiers: how they are found, joined and refused, and that a user's own one is inlined like the shipped ones."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from rigs.kernels.attention_batches import Row, Truth, make_batch
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.attention import (
    Modifier,
    Modifiers,
    and_masks,
    find_modifier,
    known_modifiers,
    or_masks,
)
from deltaline_kernels.attention.modifiers import shipped

NAMES = ["alibi", "causal", "document", "logit_bias", "prefix_lm", "sink_tokens", "sliding_window", "soft_cap"]


def every_third(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Tensor) -> Tensor:
    return (kv % p == 0) & (kv <= q)


# As in a user's package; the kernel's function is beside the tests.
OWN = Modifier(
    "every_third",
    "mask",
    "rigs.kernels.attention_own:every_third",
    every_third,
    int,
    range_kernel="rigs.kernels.attention_own:every_third_range",
    bounds=lambda first, last, p: (None, last + 1),
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register entry points: a modifier, and what is none."""
    points = [
        EntryPoint("every_third", "kernels.attention.test_attention_modifiers:OWN", shipped.GROUP),
        EntryPoint("broken", "kernels.attention.test_attention_modifiers:NAMES", shipped.GROUP),
    ]

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for point in points if group == shipped.GROUP and name in (None, point.name)]

    monkeypatch.setattr(shipped, "entry_points", entry_points)


def test_the_shipped_ones_are_known() -> None:
    assert known_modifiers() == NAMES
    assert [find_modifier(name).name for name in NAMES] == NAMES


def test_an_unknown_name_lists_the_known_ones(registered: None) -> None:
    with pytest.raises(
        ValueError, match=r"^modifier: expected one of alibi, broken, causal, .*every_third.*; got 'casual'"
    ):
        find_modifier("casual")
    with pytest.raises(TypeError, match=r"^deltaline.modifiers 'broken': expected a Modifier, got list"):
        find_modifier("broken")


def test_a_registered_modifier_is_inlined(path: Path, registered: None) -> None:
    batch = make_batch([Row(1, 100), Row(3, 20), Row(20, 5)], path, max_short=4)
    modifiers = Modifiers(mask=find_modifier("every_third")(3), device=path.device)
    want = batch.expected(Truth(None, lambda b, h, q, kv: (kv % 3 == 0) & (kv <= q)))[0]
    assert_close("o", batch.attend(path, modifiers)[0], want, path.dtype)


def test_ranges_are_intersected_and_joined() -> None:
    causal, window, first = (
        find_modifier("causal")(),
        find_modifier("sliding_window")(10),
        find_modifier("sink_tokens")(4),
    )
    cases: list[tuple[Any, tuple[int, int]]] = [
        (None, (0, 200)),
        (causal, (0, 102)),
        (window, (91, 200)),
        (and_masks(causal, window), (91, 102)),
        (or_masks(first, and_masks(causal, window)), (0, 102)),
        (and_masks(first, window), (200, 200)),
        (or_masks(and_masks(first, window), and_masks(causal, window)), (91, 102)),
    ]
    for mask, want in cases:
        assert Modifiers(mask=mask).bounds(0, 100, 101, 200) == want
    widths = find_modifier("sliding_window")(torch.tensor([3, 20]), per="head")
    assert Modifiers(mask=widths).bounds(0, 100, 101, 200) == (81, 200)
    lines = find_modifier("prefix_lm")(torch.tensor([3, 150]), per="sequence")
    assert [Modifiers(mask=lines).bounds(b, 100, 101, 200) for b in (0, 1)] == [(0, 102), (0, 150)]


def test_one_part_in_two_clauses_has_one_parameter() -> None:
    causal, window = find_modifier("causal")(), find_modifier("sliding_window")(7)
    modifiers = Modifiers(mask=or_masks(and_masks(causal, window), and_masks(window, find_modifier("sink_tokens")(2))))
    assert modifiers.parameters.tolist() == [7, 2]
    assert [len(clause) for clause in modifiers.clauses] == [2, 2]


def test_integers_are_taken_whole_or_not_at_all() -> None:
    """Of the host in 64 bits too, which their values tell; the largest and the least among them."""
    most, least = 2**31 - 1, -(2**31)
    for dtype in (torch.int64, torch.int32):
        document = find_modifier("document")(torch.tensor([most, 5, least], dtype=dtype))
        assert Modifiers(mask=document).parameters.tolist() == [most, 5, least]
    narrow = find_modifier("sink_tokens")(torch.tensor([3, 250], dtype=torch.uint8), per="head")
    assert Modifiers(mask=narrow).parameters.tolist() == [3, 250]
    assert Modifiers(mask=find_modifier("sliding_window")(most)).parameters.tolist() == [most]


def test_what_is_no_modifier_is_refused() -> None:
    causal, cap, window, document = map(find_modifier, ("causal", "soft_cap", "sliding_window", "document"))
    table = torch.tensor([5, 5 + 2**32])
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "causal: expected no parameter, got int", lambda: causal(3)),
        (TypeError, "soft_cap: expected a parameter of float, got NoneType", cap),
        (TypeError, "soft_cap: expected a number, got '3'", lambda: cap("3")),  # type: ignore[arg-type]
        (TypeError, "soft_cap: expected a tensor, got 3.0", lambda: cap(3.0, per="head")),
        (ValueError, "soft_cap: expected a tensor of 1 dimensions", lambda: cap(torch.ones(2, 2), per="head")),
        (ValueError, "per: expected all, head, sequence, got 'row'", lambda: cap(3.0, per="row")),
        (TypeError, "sliding_window: expected an integer, got 2.5", lambda: window(2.5)),
        (TypeError, "prefix_lm: expected integers", lambda: find_modifier("prefix_lm")(torch.ones(2), per="head")),
        (TypeError, "document: expected torch.int32, got torch.int64 on meta", lambda: document(table.to("meta"))),
        (
            TypeError,
            "document: expected torch.int32, got torch.uint32 on cpu",
            lambda: document(table.to(torch.uint32)),
        ),
        (ValueError, r"document: expected numbers that int32 holds, got 5..4294967301", lambda: document(table)),
        (ValueError, "sliding_window: expected numbers that int32 holds", lambda: window(torch.tensor(2**32))),
        (ValueError, "sliding_window: expected a number that int32 holds, got 1099511627776", lambda: window(2**40)),
        (ValueError, "sliding_window: expected a number that int32 holds, got inf", lambda: window(torch.inf)),
        (ValueError, "sliding_window: expected a number that int32 holds, got nan", lambda: window(torch.nan)),
        (TypeError, "mask: expected a mask modifier .*got the score modifier 'soft_cap'", lambda: and_masks(cap(1.0))),
        (TypeError, "mask: expected .*got the modifier 'causal' itself", lambda: Modifiers(mask=causal)),  # type: ignore[arg-type]
        (TypeError, "scores: expected .*got the mask modifier 'causal'", lambda: Modifiers([causal()])),
        (ValueError, "masks: expected at least one", or_masks),
        (ValueError, "kind: ", lambda: Modifier("x", "bias", "a:b", every_third)),
        (ValueError, "x: expected range_kernel", lambda: Modifier("x", "mask", "a:b", every_third, range_kernel="a:b")),
        (KeyError, "'causal'", lambda: (lambda part: Modifiers(mask=part).value(part))(causal())),
    ]
    for kind, message, make in wrong:
        with pytest.raises(kind, match=rf"^{message}"):
            make()
