"""Where the chunks of many rows are: their starts are looked at 128 at a time."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.gluon_on_cpu import OnCpu

slots = pytest.importorskip("rigs.kernels.chunk_slots", reason="triton is not installed")
CHUNK = 16
# Slots of the rows before this one are left to tests of fewer rows.
FIRST_ROW = 125


def test_chunks_of_more_rows_than_are_looked_at_at_once() -> None:
    """By both functions: every chunk has its slot, and no other slot has one."""
    for num_rows in (130, 200):
        lengths = torch.tensor([(1, 16, 0, 33)[i % 4] for i in range(num_rows)])
        starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
        expected = {
            start // CHUNK + i + done // CHUNK: [start + done, start + length, 1]
            for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=False))
            for done in range(0, length, CHUNK)
        }
        first_slot, num_slots = int(starts[FIRST_ROW]) // CHUNK + FIRST_ROW, int(starts[-1]) // CHUNK + num_rows
        found = torch.full((2, num_slots - first_slot, 3), -1, dtype=torch.int32)
        told = {"num_rows": num_rows, "first_slot": first_slot, "CHUNK": CHUNK}
        slots.write_chunks[(found.shape[1],)](starts, found[0], **told)
        OnCpu(slots.write_chunks_in_gluon)[(found.shape[1],)](starts, found[1], **told, WARPS=4, num_warps=4)
        for one in found.tolist():
            got = {slot: chunk for slot, chunk in enumerate(one, first_slot) if chunk[2]}
            assert got == {slot: chunk for slot, chunk in expected.items() if slot >= first_slot}
