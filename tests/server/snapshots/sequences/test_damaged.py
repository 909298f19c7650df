"""Streams that are no sequence, or a damaged one: each is refused by its reason, and nothing of it is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from rigs.exchanged_states import file_of, forged
from rigs.state_rig import FINGERPRINT, StateRig
from rigs.stored_states import VERIFY
from rigs.whole_sequences import check_idle, imported, prefilled

from deltaline_server.errors import Reason, RequestError
from deltaline_server.snapshots.header import StoredHeader, decode
from deltaline_server.snapshots.layout import LayoutError, Part

PREAMBLE_BYTES = 40
DAMAGED, MISMATCH, INVALID = Reason.STATE_DAMAGED, Reason.STATE_MISMATCH, Reason.INVALID_REQUEST


class Whole:
    """A sequence's file that is accepted: of two spans, the second of which has a verify that waits."""

    def __init__(self, rig: StateRig, content: bytes) -> None:
        self.layout, self.content = rig.tiers.layout, content
        self.header_bytes = int.from_bytes(content[12:16], "little")
        self.stored: StoredHeader = decode(content[: self.header_bytes], self.layout, FINGERPRINT)
        self.memory = np.frombuffer(content[self.header_bytes :], dtype=np.uint8)

    def with_spans(self, span: int, **changes: int) -> bytes:
        """Another progress, with the sections that belong to it, and digests that fit."""
        header = self.stored.header
        spans = tuple(replace(one, **changes) if i == span else one for i, one in enumerate(header.spans))
        try:
            sections = self.layout.sections(spans)
        except LayoutError:  # it has none
            return file_of(replace(header, spans=spans), self.stored.sections, self.memory)
        memory = np.zeros(max(one.end for one in sections), dtype=np.uint8)
        return file_of(replace(header, spans=spans), sections, memory)


Spoilt = tuple[bytes, set[Reason]]
Spoil = Callable[[Whole, np.random.Generator], Spoilt]


def flipped(whole: Whole, rng: np.random.Generator, *, low: float, reasons: set[Reason]) -> Spoilt:
    """One bit is another: of the preamble, or behind it."""
    content = bytearray(whole.content)
    at = int(rng.integers(0, PREAMBLE_BYTES) if low == 0 else rng.integers(PREAMBLE_BYTES, len(content)))
    content[at] ^= 1 << int(rng.integers(8))
    return bytes(content), reasons


def cut(whole: Whole, rng: np.random.Generator) -> Spoilt:
    ends = [whole.header_bytes + one.offset for one in whole.stored.sections]
    sizes = [0, 1, 39, 40, whole.header_bytes, len(whole.content) - 1, *ends]
    size = int(rng.choice(sizes) if rng.random() < 0.5 else rng.integers(len(whole.content)))
    return whole.content[:size], {DAMAGED}


def lengthened(whole: Whole, rng: np.random.Generator) -> Spoilt:
    return whole.content + rng.bytes(int(rng.integers(1, 5000))), {INVALID}


def swapped(whole: Whole, rng: np.random.Generator) -> Spoilt:
    """Two sections in each other's places, or one twice."""
    content, sections = bytearray(whole.content), whole.stored.sections
    while content == whole.content:
        one, other = (sections[int(i)] for i in rng.choice(len(sections), 2, replace=False))
        size = min(one.num_bytes, other.num_bytes)
        first, second = (slice(at, at + size) for at in (whole.header_bytes + part.offset for part in (one, other)))
        before = bytes(content[first])
        content[first] = content[second]
        if rng.random() < 0.5:
            content[second] = before
    return bytes(content), {DAMAGED}


def foreign(whole: Whole, rng: np.random.Generator) -> Spoilt:
    changes: list[dict[str, Any]] = [
        {"fingerprint": rng.bytes(32)},
        {"adapter": "other", "adapter_hash": rng.bytes(32)},
        {"adapter_hash": rng.bytes(32)},
    ]
    change = changes[int(rng.integers(len(changes)))]
    return forged(whole.layout, whole.content, lambda *_: None, **change), {MISMATCH}


def another_kind(whole: Whole, rng: np.random.Generator) -> Spoilt:
    """A progress that only sequences have, of what says that it is a snapshot."""
    del rng
    return forged(whole.layout, whole.content, lambda *_: None, is_sequence=False), {INVALID}


def of_other_sizes(whole: Whole, rng: np.random.Generator) -> Spoilt:
    """Its sections are not those of its progress."""
    header, span = whole.stored.header, int(rng.integers(2))
    change = (
        {"num_commits": 1 + int(rng.integers(8))}
        if rng.random() < 0.5
        else {"reply_bytes": int(rng.integers(1, 2**20))}
    )
    spans = tuple(replace(one, **change) if i == span else one for i, one in enumerate(header.spans))
    return file_of(replace(header, spans=spans), whole.stored.sections, whole.memory), {INVALID}


def of_no_ledger(whole: Whole, rng: np.random.Generator) -> Spoilt:
    """A progress that no steps lead to, or more than a sequence may have here; all sections and digests fit."""
    many = int(rng.integers(10**6, 2**50))
    impossible: list[tuple[int, dict[str, int]]] = [
        (1, {"step": 0}),
        (1, {"replay": 1}),
        (1, {"records_0": 0, "records_1": 0}),
        (1, {"committed_step": whole.stored.header.spans[1].step}),
        (0, {"committed_accepted": 1}),
        (0, {"committed_step": many}),
        (1, {"num_commits": 1}),
        (0, {"replay": 47, "records_0": 47}),
        (0, {"pending": 1000}),
        (0, {"zero_commits": -many}),
        (1, {"draft_half": int(rng.integers(2, 2**31))}),
    ]
    span, change = impossible[int(rng.integers(len(impossible)))]
    return whole.with_spans(span, **change), {INVALID, MISMATCH}


def not_finite(whole: Whole, rng: np.random.Generator) -> Spoilt:
    def change(sections: Any, memory: Any) -> None:
        others = Part.COMMITS, Part.REPLY
        states = [one for (part, _, _), one in sections.items() if part not in others and one.num_bytes]
        section = states[int(rng.integers(len(states)))]
        at = section.offset + 8 * int(rng.integers(section.num_bytes // 8))
        memory[at : at + 8] = 0xFF

    return forged(whole.layout, whole.content, change), {Reason.NON_FINITE_INPUT}


SPOILS: tuple[Spoil, ...] = (
    partial(flipped, low=0, reasons={DAMAGED, INVALID, MISMATCH}),
    partial(flipped, low=1, reasons={DAMAGED}),
    cut,
    lengthened,
    swapped,
    foreign,
    another_kind,
    of_other_sizes,
    of_no_ledger,
    not_finite,
)


async def check_damaged(pair: Any, numbers: range) -> Counter[Reason]:
    """Import damaged streams of every kind; return the reasons that they were refused for."""
    rig, to = pair("hybrid, two spans")
    one = await prefilled(rig)
    await one.step(1, VERIFY, 3)
    whole, reasons = Whole(rig, await one.exported()), Counter[Reason]()
    for number in numbers:
        content, expected = SPOILS[number % len(SPOILS)](whole, np.random.default_rng(number))
        with pytest.raises(RequestError) as caught:
            await imported(to, [content[i : i + 10_000] for i in range(0, len(content), 10_000)])
        refusal = caught.value.refusal
        assert refusal.reason in expected, (number, refusal)
        assert ": expected " in refusal.message or "must be" in refusal.message, (number, refusal)
        assert to.table.num_open == 0 and to.table.replies.used_bytes == 0
        check_idle(to)
        reasons[refusal.reason] += 1
    await imported(to, [whole.content])
    return reasons


async def test_damaged_sequences_are_named_and_leave_nothing(pair: Any) -> None:
    reasons = await check_damaged(pair, range(200))
    assert reasons.keys() == {DAMAGED, INVALID, MISMATCH, Reason.NON_FINITE_INPUT}


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
async def test_10000_damaged_sequences(pair: Any, part: int) -> None:
    await check_damaged(pair, range(part * 1000, part * 1000 + 1000))
