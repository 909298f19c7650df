"""Rows that the tests of every recurrence have: of any length, of at most eight tokens, and long ones."""

from __future__ import annotations

from rigs.kernels.batches import Row

# Of layers with room for four drafts.
ROWS = {
    "decode": [Row(1) for _ in range(5)],
    "decode-of-scattered-lines": [Row(1), Row(1, to="other"), Row(1, fresh=True), Row(1, to="nowhere")],
    "chunks-that-follow-each-other": [Row(n, to="other") for n in (128, 5, 64, 191, 63, 1, 65)],
    "empty": [Row(0), Row(0, to="other"), Row(0, replayed=3, half=1), Row(0, fresh=True), Row(0, to="nowhere")],
    # Peers took what is behind an empty row for the first chunk of all.
    "empty-between": [Row(70), Row(0, to="other"), Row(0, replayed=3), Row(66), Row(0)],
    "verify-every-replayed-count": [Row(4, verify=True, replayed=r, half=r % 2) for r in range(5)],
    "verify-of-other-lengths": [Row(n, verify=True, replayed=1, to="other") for n in range(1, 5)],
    "verify-that-writes-nothing": [Row(4, verify=True, replayed=2, to="nowhere"), Row(2, verify=True)],
    "long-replays": [Row(5, replayed=4), Row(40, replayed=2, half=1, to="other"), Row(9, replayed=3, to="nowhere")],
    "skipped-and-null": [Row(1, skipped=True), Row(3, to="null"), Row(9, skipped=True), Row(9, to="null")],
    "fresh-with-a-count": [
        Row(2, fresh=True, replayed=2),
        Row(3, verify=True, fresh=True, replayed=1),
        Row(9, fresh=True, replayed=2),
    ],
    "mixed": [
        Row(1),
        Row(4, verify=True, replayed=1, half=1),
        Row(2, skipped=True),
        Row(0),
        Row(3, fresh=True),
        Row(41),
        Row(1),
    ],
}

# Of layers with room for eight drafts.
SHORT_ROWS = {
    "verify-1-to-8": [Row(n, verify=True, replayed=8 - n, half=n % 2) for n in range(1, 9)],
    "verify-every-replayed-count": [Row(2, verify=True, replayed=r, half=r % 2) for r in range(9)],
    "beside-decode-and-empty": [
        Row(1),
        Row(5, verify=True, replayed=3, half=1),
        Row(8),
        Row(3, skipped=True),
        Row(0, replayed=4),
        Row(0, to="other"),
        Row(4, fresh=True),
        Row(7, replayed=8, half=1, to="other"),
    ],
    "to-anywhere": [
        Row(4, verify=True, replayed=2, to="other"),
        Row(3, verify=True, replayed=2, to="nowhere"),
        Row(2, verify=True, to="other"),
        Row(2, to="nowhere"),
        Row(3, verify=True, replayed=1, to="null"),
        Row(3, to="null"),
    ],
    "fresh-with-a-count": [Row(2, fresh=True, replayed=2), Row(3, verify=True, fresh=True, replayed=1)],
}

LONG_ROWS = [
    Row(5),
    Row(200, replayed=3, half=1),
    Row(64, fresh=True),
    Row(0),
    Row(70, skipped=True),
    Row(129, to="other", replayed=2),
    Row(128, to="nowhere"),
    Row(1, replayed=1),
    Row(400),
]
